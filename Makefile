# make demo: sets up, renders the shipped example, shows it.    make test: sets up, fetches assets, runs all tests.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
JOBS   ?= 2

# Small matrices on few cores: threads of the BLAS only get in each other's way.
export OPENBLAS_NUM_THREADS ?= 1

.PHONY: demo test lint types assets bench test-long install-check clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"

$(VENV)/.base: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.test: $(VENV)/.base
	$(BIN)/python -m pip install --quiet --group test --group lint
	touch $@

$(VENV)/.bench: $(VENV)/.test
	$(BIN)/python -m pip install --quiet --group bench
	touch $@

demo: $(VENV)/.base
	$(BIN)/tokentrace demo

assets: $(VENV)/.test
	$(BIN)/python -m tests.assets

test: assets
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup

test-long: assets
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup -m long

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/mypy

bench: $(VENV)/.bench assets
	$(BIN)/python -m bench

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
