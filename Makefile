# `make demo` and `make test` are the two commands of the README; both install what they need.
SHELL := /bin/bash
VENV ?= .venv
PY := $(VENV)/bin/python
export PYTHONDONTWRITEBYTECODE = 1

.PHONY: help deps venv build demo test unit lint conformance c-test bench clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

deps: ## Debian packages and the virtual environment
	@./tests/tools/install-packages
	@./tests/tools/make-venv "$(VENV)"

build: deps ## compile the C core, the keeper and the protobuf bindings in place
	@$(PY) setup.py -q build_ext --inplace

lint: build ## ruff, mypy --strict, import floors, tidy, C warnings as errors
	@$(PY) -m ruff check . && $(PY) -m ruff format --check -q .
	@$(PY) -m mypy
	@$(VENV)/bin/lint-imports
	@$(PY) -m pytest -q tests/tidy
	@$(MAKE) -s -C tests/c warnings

test: build ## everything: lint, unit, C, conformance, integration with real containerd
	@./tests/tools/run-tests "$(VENV)"

clean: ## remove what the build made
	rm -rf build dist *.egg-info snapshotter/rpc/pb ioengine/*.so ioengine/_native.c ioengine/ember-keeper tests/c/bin
