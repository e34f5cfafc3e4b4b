# Everything that a person or a machine does with this repository. `make serve` and `make test` need Python 3.11, pip
# and make, nothing else: each makes its own virtual environment.

PYTHON ?= python3.11
RUNTIME ?= cpu# cpu or gpu
DATA ?= data/multi30k# a folder of parallel text: train.en, train.de, val.en, ...
RUN ?= runs/multi30k-en-de
BUNDLE ?= bundles/multi30k-en-de

SERVE := .venv-serve-$(RUNTIME)
DEV := .venv
PIP_INSTALL = -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: serve test check fix train evaluate export bench loadtest image up down clean

serve: $(SERVE)/ready  ## serve the bundles that are in bundles/
	$(SERVE)/bin/python -m service

test: $(DEV)/ready  ## every test that needs nothing but Python
	$(DEV)/bin/python -m pytest

check: $(DEV)/ready  ## format, lint, types, walls between the packages
	$(DEV)/bin/ruff format --check .
	$(DEV)/bin/ruff check .
	$(DEV)/bin/mypy
	$(DEV)/bin/lint-imports

fix: $(DEV)/ready  ## what `check` can mend by itself
	$(DEV)/bin/ruff format .
	$(DEV)/bin/ruff check --fix .

train: $(DEV)/ready  ## train from DATA into RUN; run it again to resume
	$(DEV)/bin/python -m model train $(DATA) --run $(RUN)

evaluate: $(DEV)/ready  ## BLEU of RUN's averaged checkpoint on DATA's test set
	$(DEV)/bin/python -m model evaluate $(RUN)/averaged $(DATA)

export: $(DEV)/ready  ## RUN's averaged checkpoint to BUNDLE
	$(DEV)/bin/python -m export $(RUN)/averaged --out $(BUNDLE)

$(SERVE)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(SERVE)
	$(SERVE)/bin/python $(PIP_INSTALL) -e '.[$(RUNTIME)]'
	touch $@

$(DEV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DEV)
	$(DEV)/bin/python $(PIP_INSTALL) -e '.[cpu,train,dev]'
	touch $@

clean:
	rm -rf .venv .venv-serve-* build *.egg-info .mypy_cache .pytest_cache .ruff_cache
