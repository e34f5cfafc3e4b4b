# Everything that a person or a machine does with this repository. `make serve` and `make test` need Python 3.11, pip
# and make, nothing else: each makes its own virtual environment.

PYTHON ?= python3.11
RUNTIME ?= cpu# cpu or gpu
DATA ?= data/multi30k# a folder of parallel text: train.en, train.de, val.en, ...
ZOO_DATA ?= data# a folder with the folders multi30k and sst2
SYSTEMS ?=# of the zoo, as in 'luong-dot chat-gatt'; all where none is named
RUN ?= runs/multi30k-en-de
PRECISION ?= float32# of training; bfloat16 is faster where the processor has it, see docs/training.md
BUNDLE ?= bundles/multi30k-en-de
COMPOSE ?= docker-compose# or: docker compose
BENCH ?=# sections and options, see: python -m bench --help
SOAK ?= 30# minutes
LOAD ?= --clients 16 --duration 10s# see: python -m loadtest --help

FUZZ_EXAMPLES ?= 500

SERVE := .venv-serve-$(RUNTIME)
DEV := .venv
GPU := .venv-gpu
PIP_INSTALL = -m pip install --quiet --disable-pip-version-check -c constraints.txt
CUDA_LIBRARIES := $(if $(filter gpu,$(RUNTIME)),-c constraints-gpu.txt)

.PHONY: serve test test-all test-docker test-memory test-browser fuzz check fix train zoo evaluate export bench soak gpu-check loadtest image up down clean

serve: $(SERVE)/ready  ## serve the bundles that are in bundles/
	$(SERVE)/bin/python -m service

test: $(DEV)/ready  ## every test that needs nothing but Python, as many side by side as there are processors; 7 minutes on two
	$(DEV)/bin/python -m pytest -n auto --dist loadfile

test-all: $(DEV)/ready  ## `test`, the slow tests, then equality and export under each lesser instruction set of this processor
	$(DEV)/bin/python -m pytest -n auto --dist loadfile -m 'not docker and not browser and not cgroup'
	$(DEV)/bin/python -m tests.instruction_sets

fuzz: $(DEV)/ready  ## what `test` asks of the OpenAPI document, with FUZZ_EXAMPLES random requests a route; half an hour
	FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) $(DEV)/bin/python -m pytest tests/e2e/test_schemathesis.py

check: $(DEV)/ready  ## format, lint, types, walls between the packages
	$(DEV)/bin/ruff format --check .
	$(DEV)/bin/ruff check .
	$(DEV)/bin/mypy
	$(DEV)/bin/lint-imports

fix: $(DEV)/ready  ## what `check` can mend by itself
	$(DEV)/bin/ruff format .
	$(DEV)/bin/ruff check --fix .

train: $(DEV)/ready  ## train from DATA into RUN; run it again to resume
	$(DEV)/bin/python -m model train $(DATA) --run $(RUN) --precision $(PRECISION)

zoo: $(DEV)/ready  ## train, score and export every system from ZOO_DATA, or SYSTEMS, many hours; run it again to resume
	$(DEV)/bin/python -m model zoo $(ZOO_DATA) --runs runs/zoo --precision $(PRECISION) $(if $(SYSTEMS),--systems $(SYSTEMS))
	$(DEV)/bin/python -m export zoo runs/zoo --out runs/zoo-bundles --half-weights

evaluate: $(DEV)/ready  ## BLEU of RUN's averaged checkpoint on DATA's test set
	$(DEV)/bin/python -m model evaluate $(RUN)/averaged $(DATA)

export: $(DEV)/ready  ## RUN's averaged checkpoint to BUNDLE
	$(DEV)/bin/python -m export $(RUN)/averaged --out $(BUNDLE)

bench: $(DEV)/ready  ## measure all of docs/performance.md, or BENCH='SECTION ...'; some 25 minutes of a quiet machine
	$(DEV)/bin/python -m bench $(BENCH)

soak: $(DEV)/ready  ## every endpoint for SOAK minutes, clients that leave included: memory, descriptors and threads stay flat
	$(DEV)/bin/python -m bench.soak --minutes $(SOAK)

gpu-check: $(GPU)/ready  ## on a machine with a GPU: CUDA gives what the CPU gives, and how fast
	$(GPU)/bin/python -m bench.gpu

loadtest: $(DEV)/ready  ## load the service that runs on this machine
	$(DEV)/bin/python -m loadtest $(LOAD)

image:  ## the service's image, `sightline`
	docker build --target service -t sightline .

up:  ## the service in a container, on http://127.0.0.1:8000
	$(COMPOSE) up --build --detach

down:  ## stop it, letting work in flight finish
	$(COMPOSE) down

test-docker: $(DEV)/ready  ## the tests that need a Docker engine
	$(DEV)/bin/python -m pytest -m docker tests/deployment

test-memory: $(DEV)/ready  ## as root: the shipped bundles in a cgroup of 512 MiB; some minutes
	$(DEV)/bin/python -m pytest -m cgroup tests/deployment

test-browser: $(DEV)/ready  ## the tests that need Chromium
	$(DEV)/bin/python $(PIP_INSTALL) -e '.[browser]'
	$(DEV)/bin/python -m pytest -m browser tests/browser

$(SERVE)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(SERVE)
	$(SERVE)/bin/python $(PIP_INSTALL) $(CUDA_LIBRARIES) -e '.[$(RUNTIME)]'
	touch $@

$(DEV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DEV)
	$(DEV)/bin/python $(PIP_INSTALL) -e '.[cpu,train,dev,bench]'
	touch $@

$(GPU)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(GPU)
	$(GPU)/bin/python $(PIP_INSTALL) -e '.[gpu,train,bench]'
	touch $@

clean:  ## the virtual environments and what tools left behind
	rm -rf .venv .venv-serve-* .venv-gpu build *.egg-info .mypy_cache .pytest_cache .ruff_cache
