# What a user and .ci/run call. `make test` and `make demo` do their own set-up.

# Read only when .venv is made: Python 3.11 to 3.13.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
# Each takes whole files, the slow ones first, in this order; one more than cores, for servers that start or end are waited
# for. No workers: TEST_WORKERS=0.
TEST_WORKERS ?= 3
PYTEST_ARGS ?=
DEMO_ARGS ?=

# A test run starts hundreds of processes. Each would compile our modules anew.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.hcache-setup
TEST_DIRS := $(wildcard tests/e2e tests/faults tests/unit)
LINTED := $(wildcard sglang_hcache tests benchmarks)

.PHONY: help setup lock test demo lint docs clean
.DEFAULT_GOAL := help

help: ## Show this list.
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## Make .venv with the locked dependencies and `hcache` (PYTHON=... picks the interpreter).
	@:

test: setup ## Run the end-to-end tests, the fault suite and the unit tests (PYTEST_ARGS=... is passed on).
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS) $(TEST_DIRS)

demo: setup ## Multi-turn conversations with and without the tier, side by side (DEMO_ARGS=... is passed on).
	$(BIN)/hcache demo $(DEMO_ARGS)

lint: setup ## ruff check, ruff format --check, mypy.
	$(BIN)/ruff check $(LINTED)
	$(BIN)/ruff format --check $(LINTED)
	$(BIN)/mypy

# The variable: Material says that its successor reads the same mkdocs.yml (docs/dependencies.md), at every build.
docs: setup ## Build the documentation as a site in build/site; any warning fails.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# Versions stay as they are unless pyproject.toml forbids them; `make lock LOCK_ARGS=--upgrade` renews all.
# Relative paths only, and no index addresses: the file is the same on every machine.
lock: ## Write requirements.lock again from pyproject.toml.
	uv pip compile pyproject.toml --group dev --universal --python-version 3.11 --generate-hashes \
	    --no-header --no-emit-index-url --no-emit-find-links $(LOCK_ARGS) --output-file requirements.lock

clean: ## Remove .venv and the tools' caches.
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info

# No dependency on the sources: the install is editable.
$(STAMP): pyproject.toml requirements.lock .ci/setup
	@.ci/setup $(VENV) "$(PYTHON)"
	@touch $@
