# `make demo` and `make test` are the two commands of the README; both install what they need.
SHELL := /bin/bash
VENV ?= .venv
PY := $(VENV)/bin/python
export PYTHONDONTWRITEBYTECODE = 1

.PHONY: help deps venv build demo test unit lint c-test conformance integration bench
.PHONY: clean distclean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

deps: ## Debian packages and the virtual environment
	@./tests/tools/install-packages
	@./tests/tools/make-venv "$(VENV)"

venv: deps

build: deps ## compile the C core, the keeper and the protobuf bindings in place
	@$(PY) setup.py -q build_ext --inplace

demo: build ## the same image through overlayfs and through Ember, in one table (root)
	@$(PY) -m bench.demo

lint: build ## ruff, mypy --strict (tests too), import floors, tidy, C warnings as errors
	@./tests/tools/run-tests "$(VENV)" ruff format types floors tidy
	@$(MAKE) -s -C tests/c warnings

unit: build ## the tests that need no root and no kernel feature
	@./tests/tools/run-tests "$(VENV)" unit

c-test: build ## the C sources: warnings as errors, their tests, under ASan and UBSan too
	@./tests/tools/run-tests "$(VENV)" c

conformance: build ## containerd's own snapshotter suite against Ember's socket
	@./tests/conformance/snapshots/run "$(VENV)"

integration: build ## real mounts, a real registry, real containerd (root)
	@./tests/tools/run-tests "$(VENV)" integration

test: build ## everything: lint, unit, C, conformance, integration with real containerd
	@./tests/tools/run-tests "$(VENV)"

bench: build ## all measurements, ratios in one run, JSON and charts in build/bench (root)
	@mkdir -p build/bench
	@$(PY) -m bench --all --json build/bench/results.json --plots build/bench/plots

clean: ## remove what the build and the tests made (distclean: what they fetched too)
	rm -rf build dist *.egg-info snapshotter/rpc/pb ioengine/*.so ioengine/_native.c \
	  ioengine/ember-keeper tests/c/bin .cache/test-logs

distclean: clean ## also remove what was fetched: .cache and the virtual environment
	rm -rf .cache "$(VENV)" .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
