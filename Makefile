# Everything runs from .venv in this folder, which the first target you run sets up by itself.
# Needed on the machine: Python 3.11 or newer, make. Another Python: make PYTHON=/path/to/python3.12 test
# Arguments go through ARGS: make test ARGS="tests/core -x", make demo ARGS="--json"

.DEFAULT_GOAL := help
.PHONY: help demo test lint format bench crash gpu clean distclean env-demo env-test

ifeq ($(origin PYTHON),undefined)
PYTHON := $(shell for p in python3.11 python3.12 python3.13 python3.14 python3; do \
    $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
endif
BIN := .venv/bin

export PYTHONSAFEPATH := 1
# Spinning OpenMP threads make small steps ten times slower on few cores.
export OMP_WAIT_POLICY := passive
unexport PYTHONPATH PYTHONHOME

SETUP = if ! "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
    echo "kvstrata needs Python 3.11 or newer; name one: make PYTHON=/path/to/python3.11" >&2; exit 2; fi; \
    "$(PYTHON)" tools/environment.py

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env-demo:
	@$(SETUP) demo

env-test:
	@$(SETUP) test

demo: env-demo ## a real model answers from its stored KV cache: one table
	@$(BIN)/kvstrata demo $(ARGS)

test: env-test ## the whole suite
	@$(BIN)/python -m pytest $(ARGS)

lint: env-test ## ruff, format, mypy --strict, import-linter
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: env-test ## rewrite the sources the way lint wants them
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: env-test ## what the cold path and an idle store cost
	@$(BIN)/kvstrata bench ttft $(ARGS)
	@$(BIN)/kvstrata bench idle $(ARGS)

crash: env-test ## kill -9 at every dangerous moment, then look at what is left
	@$(BIN)/python -m pytest tests/crash $(ARGS)

gpu: env-test ## the checks that need a CUDA device
	@PATH="$(CURDIR)/$(BIN):$$PATH" bash bench/gpu.sh $(ARGS)

clean: ## remove what tools leave behind
	@rm -rf build dist src/*.egg-info *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find . -name .venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## remove the environment and caches too
	@rm -rf .venv .cache
