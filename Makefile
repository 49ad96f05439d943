# Everything happens inside this folder: packages in .venv, caches in .cache.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
export PIP_CACHE_DIR := $(CURDIR)/.cache/pip
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export RUFF_CACHE_DIR := $(CURDIR)/.cache/ruff
export HEADWAY_CACHE_DIR := $(CURDIR)/.cache/headway
export BUF_CACHE_DIR := $(CURDIR)/.cache/buf
export PYTHONPYCACHEPREFIX := $(CURDIR)/.cache/pycache

PROTOS = $(shell find proto -name '*.proto' | sort)
GENERATED := headway/v1 headway/internal/v1alpha
protoc = PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I proto \
	--python_out=$(1) --mypy_out=quiet:$(1) --grpc_python_out=$(1) --mypy_grpc_out=quiet:$(1) $(PROTOS)

.DEFAULT_GOAL := help
.PHONY: help setup demo test coverage check lint types layers contract generate format bench soak mutants validate clean

help: ## show this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1|\2/' | column -t -s '|'

setup: $(INSTALLED) ## install everything into .venv

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo "Python 3.11 or newer is needed; '$(PYTHON)' is older, or is not there. Try: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 2; }
	@echo "Setting up $(VENV), once: this takes minutes"
	@test -x $(BIN)/pip || $(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python -m pip install --quiet -c constraints.txt hatchling editables
	@$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

demo: $(INSTALLED) ## run the main job: a server, eight robots, batch work beside them
	@exec $(BIN)/headway demo

test: $(INSTALLED) ## pass the tests
	@mkdir -p .cache && $(BIN)/python -m pytest tests/cloud/scheduler -n auto --dist loadfile --basetemp=.cache/pytest
	@$(BIN)/python -m pytest --ignore=tests/cloud/scheduler --basetemp=.cache/pytest

# Apart from the tests, whose time it doubles; the long proofs add no line to it.
coverage: $(INSTALLED) ## which lines and branches the tests reach
	@mkdir -p .cache && $(BIN)/python -m pytest tests/cloud/scheduler --ignore=tests/cloud/scheduler/proofs -n auto --dist loadfile --cov --cov-report= --basetemp=.cache/pytest
	@$(BIN)/python -m pytest --ignore=tests/cloud/scheduler --cov --cov-append --cov-report=term:skip-covered --basetemp=.cache/pytest

check: lint types layers contract test ## what CI runs

lint: $(INSTALLED) ## style
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(INSTALLED) ## mypy, strict
	@$(BIN)/mypy

layers: $(INSTALLED) ## who may import whom
	@$(BIN)/lint-imports --no-cache

contract: $(INSTALLED) ## the .proto files: style, compatibility, and that generated code is fresh
	@$(BIN)/buf lint proto
	@tag=$$(git describe --tags --abbrev=0 --match 'v*' 2>/dev/null) || { echo "no release tag yet: nothing to stay compatible with"; exit 0; }; \
		$(BIN)/buf breaking proto --against ".git#tag=$$tag,subdir=proto"
	@rm -rf .cache/generated && mkdir -p .cache/generated && $(call protoc,.cache/generated)
	@for package in $(GENERATED); do \
		diff -rq -x __init__.py -x __pycache__ .cache/generated/$$package $$package || { echo "$$package is not what the .proto files give. Run: make generate" >&2; exit 1; }; \
	done

generate: $(INSTALLED) ## write the generated code anew from the .proto files
	@rm -f $(foreach package,$(GENERATED),$(package)/*_pb2*)
	@$(call protoc,.)

format: $(INSTALLED) ## put the code in order
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

bench: $(INSTALLED) ## measure (minutes)
	@set -e; for bench in benchmarks/bench_*.py; do echo "== $$bench"; $(BIN)/python $$bench; done

soak: $(INSTALLED) ## long proofs (many minutes)
	@mkdir -p .cache && $(BIN)/python -m pytest -m soak --timeout=3600 --basetemp=.cache/pytest

mutants: $(INSTALLED) ## break one rule of the scheduler at a time: a test must notice (many minutes)
	@$(BIN)/python tests/cloud/scheduler/mutants.py

validate: $(INSTALLED) ## checks against measured systems and large models
	@mkdir -p .cache && $(BIN)/python -m pytest -m validate --timeout=3600 --basetemp=.cache/pytest

clean: ## forget everything that was set up
	rm -rf $(VENV) .cache
