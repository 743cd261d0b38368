# Everything a developer does; `make help` lists it. Each target makes what it needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OLDEST ?= python3.10
OLDEST_VENV := .venv-oldest
STAMPS := $(VENV)/.stamps
CACHE ?= $(HOME)/.cache/pointsman
ARGS ?=
# Tests of one file run in one process, which shares what is costly to start.
JOBS ?= 2
PARALLEL := --numprocesses=$(JOBS) --dist=loadfile

.DEFAULT_GOAL := help

.PHONY: help
help:
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# -- set-up ---------------------------------------------------------------------------------------

$(STAMPS)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed, this is " + sys.version.split()[0]) if sys.version_info < (3, 10) else None'
	@test -x $(BIN)/python || { echo "Making $(VENV) ..."; $(PYTHON) -m venv $(VENV); }
	@echo "Installing packages; the first time llama.cpp is compiled, which takes about five minutes ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade "pip>=25.1"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[agent,controller,train,bench,dev]"
	@mkdir -p $(STAMPS) && touch $@

.PHONY: setup
setup: $(STAMPS)/installed ## install everything into .venv

# -- use ------------------------------------------------------------------------------------------

.PHONY: demo
demo: setup ## a controller, three agents with real models, a routed batch (ARGS=--stay, ARGS="--json FILE")
	@$(BIN)/edge-controller lab demo $(ARGS)

# -- the gate -------------------------------------------------------------------------------------

.PHONY: check
check: format-check lint types imports stubs docs ## everything that reads the code without running it

.PHONY: format
format: setup ## format the code
	@$(BIN)/ruff format
	@$(BIN)/ruff check --fix --exit-zero --quiet

.PHONY: format-check
format-check: setup
	@$(BIN)/ruff format --check

.PHONY: lint
lint: setup
	@$(BIN)/ruff check
	@$(BIN)/ansible-lint -q -c deploy/ansible/.ansible-lint deploy/ansible

.PHONY: types
types: setup
	@$(BIN)/mypy

.PHONY: imports
imports: setup
	@$(BIN)/lint-imports

.PHONY: stubs
stubs: setup ## check that the committed stubs are what the .proto files give
	@$(BIN)/python proto/generate.py --check

.PHONY: proto
proto: setup ## generate the stubs again
	@$(BIN)/python proto/generate.py

.PHONY: docs
docs: setup ## check that the reference pages are what the code gives
	@$(BIN)/python docs/generate.py --check

.PHONY: docs-write
docs-write: setup ## write the reference pages again
	@$(BIN)/python docs/generate.py

.PHONY: test
test: setup models compiled ## all tests but the slow and the privileged ones, in JOBS processes
	@$(BIN)/pytest -q $(PARALLEL) -m "not slow and not privileged" $(ARGS)

.PHONY: test-slow
test-slow: setup models compiled ## the demonstration, experiments and other tests that take long
	@$(BIN)/pytest -q -m "slow and not privileged" $(ARGS)

.PHONY: test-privileged
test-privileged: setup models compiled ## tests that boot a Debian host; needs root, debootstrap and systemd-nspawn
	@$(BIN)/pytest -q -m privileged $(ARGS)

$(OLDEST_VENV)/.installed: pyproject.toml constraints.txt
	@$(OLDEST) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 10))' || { echo "Name a Python 3.10: make test-oldest OLDEST=python3.10"; exit 1; }
	@test -x $(OLDEST_VENV)/bin/python || $(OLDEST) -m venv $(OLDEST_VENV)
	@$(OLDEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade "pip>=25.1"
	@$(OLDEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[agent,controller]" hypothesis openai pytest pytest-timeout pytest-xdist scipy
	@touch $@

.PHONY: test-oldest
test-oldest: models $(OLDEST_VENV)/.installed ## the agent's tests on the oldest Python there is on a Jetson (OLDEST=python3.10)
	@$(OLDEST_VENV)/bin/pytest -q $(PARALLEL) -m "not privileged and not data" tests/unit/edge_agent tests/contract $(wildcard tests/integration/test_agent*.py tests/integration/test_fleet*.py tests/integration/test_models_pull.py tests/integration/test_openai_engine.py) $(ARGS)

.PHONY: compiled
compiled: setup ## compile the searches, which takes about a minute the first time
	@$(BIN)/python -m controller.routing.compile_policies

.PHONY: models
models: setup ## fetch the small models that tests and the demonstration decode with
	@for name in smollm2-135m-instruct-q4_1 smollm2-135m-instruct-q4_0 gemma-3-270m-q4_k_m; do \
		$(BIN)/edge-agent models pull $$name --data-dir $(CACHE) || exit 1; done
	@test -f $(CACHE)/embedding/manifest.json || $(BIN)/edge-controller embedding export --folder $(CACHE)/embedding

.PHONY: lock
lock: setup ## resolve constraints.txt again, for every supported Python
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	@$(BIN)/uv pip compile --quiet --universal --upgrade --python-version 3.10 --no-header --no-annotate \
		--no-emit-index-url --extra agent --extra controller --extra train --extra bench --extra dev \
		pyproject.toml -o constraints.txt

.PHONY: clean
clean: ## remove .venv and every cache
	rm -rf $(VENV) $(OLDEST_VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist
