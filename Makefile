# Each target sets up its own .venv; the stamp files make that happen once, and again when pyproject.toml changes.
# make demo   real prompts, speculation off and on, in the terminal
# make test   lint, types, docs and tests: what CI runs
# make docs | lint | format | clean

PYTHON ?= python3
VENV ?= .venv
# Installed first and pinned: an unpinned torch may be a build with gigabytes of GPU libraries.
TORCH ?= torch==2.13.0
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

export OMP_WAIT_POLICY := PASSIVE
export GOMP_SPINCOUNT := 0
export TOKENIZERS_PARALLELISM := false
export HF_HUB_DISABLE_TELEMETRY := 1
export NO_MKDOCS_2_WARNING := 1

.DEFAULT_GOAL := test
.PHONY: demo test check-lint check-types check-docs check-tests docs lint format clean

demo: $(VENV)/.demo
	$(BIN)/hf-specdec demo $(ARGS)

# Recipes, not prerequisites, so that `make -j` keeps the order and pytest's closing line comes last.
test: $(VENV)/.dev
	$(MAKE) --no-print-directory check-lint
	$(MAKE) --no-print-directory check-types
	$(MAKE) --no-print-directory check-docs
	$(MAKE) --no-print-directory check-tests

check-lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

check-types: $(VENV)/.dev
	$(BIN)/mypy

check-docs: $(VENV)/.dev
	$(BIN)/mkdocs build --strict --quiet

check-tests: $(VENV)/.dev
	$(BIN)/python -m pytest -n logical --maxprocesses 4 --dist worksteal $(ARGS)

lint: check-lint check-types

docs: $(VENV)/.dev
	$(BIN)/mkdocs serve

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) site dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

# pip older than 25.1 knows no `--group`, so pip comes first.
$(VENV)/.base: Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "hf_specdec needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." >&2; \
		echo "Name another one: make $(MAKECMDGOALS) PYTHON=python3.13" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade 'pip>=25.1'
	$(PIP) install --quiet $(TORCH)
	@touch $@

$(VENV)/.demo: $(VENV)/.base pyproject.toml
	$(PIP) install --quiet --editable '.[demo]'
	@touch $@

$(VENV)/.dev: $(VENV)/.base pyproject.toml
	$(PIP) install --quiet --editable '.[demo]' --group test --group docs --group quality
	@touch $@
