# Every target sets up what it needs: a virtual environment, torch, and the five packages with all development extras.
# The stamp makes a second run skip that, until a pyproject.toml, the kernels' sources or constraints.txt changes.
# Needed: Python 3.11 or newer, and make. Settings, as `make demo PYTHON=python3.12`:
#   PYTHON      the interpreter that makes the environment
#   VENV        the folder of the environment
#   TORCH_ARGS  more arguments for pip where torch is installed, such as
#               --index-url https://download.pytorch.org/whl/cpu   (on Linux, without CUDA's gigabytes)
#   ARGS        passed on: make demo ARGS=--short, make test ARGS="-k cache", make bench ARGS=--smoke
#   WORKERS     the processes that share the tests; 0 is one process, for a debugger
#   BENCHMARKS  the scripts of make bench: make bench BENCHMARKS=benchmarks/compare.py ARGS="--only rerank"

PYTHON ?= python3
VENV ?= .venv
TORCH_ARGS ?=
ARGS ?=
WORKERS ?= 2

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check
PACKAGES := langchain llama-index qdrant milvus
PROJECTS := pyproject.toml $(PACKAGES:%=integrations/%/pyproject.toml)
# The compiled kernels are built by the installation.
KERNELS := $(wildcard hatch_build.py src/millpond/native/*.cpp src/millpond/native/*.h)
# What takes --smoke is a benchmark, the rest serves them. The one for a GPU has a target of its own; its smoke run needs none.
BENCHMARKS = $(filter-out $(if $(findstring --smoke,$(ARGS)),,benchmarks/gpu.py),$(shell grep -l -e '"--smoke"' benchmarks/*.py))
RUN = echo "== $(1) $(ARGS)"; $(BIN)/python $(1) $(ARGS)
# Nothing is timed in earnest: two at once, of one thread each, and each one's output in one piece.
SMOKE = printf '%s\n' $(BENCHMARKS) | OMP_NUM_THREADS=1 xargs -P 2 -I{} sh -c 'out=$$( ($(call RUN,{})) 2>&1); code=$$?; printf "%s\\n" "$$out"; exit $$code'
GPU_RESULT ?= benchmarks/results/gpu.json
# A file's tests stay in one process (conftest.py says which files share one).
PYTEST = $(BIN)/python -m pytest --numprocesses=$(WORKERS) --dist=loadscope
FAST = -m "not slow and not gpu and not network and not service"

.DEFAULT_GOAL := help
.PHONY: help install demo test test-integrations test-all coverage fuzz check format bench notebooks test-gpu bench-gpu constraints clean

help: ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP) ## set up .venv with the five packages and every development extra

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "millpond needs Python 3.11 or newer; name one: make install PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch first: which build of it is wanted is a decision of its own (TORCH_ARGS), and everything else asks only for torch.
$(STAMP): $(BIN)/python $(PROJECTS) $(KERNELS) constraints.txt
	$(PIP) install --quiet $(TORCH_ARGS) "$$(grep '^torch==' constraints.txt)"
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev]' $(PACKAGES:%=--editable integrations/%)
	@touch $@

demo: $(STAMP) ## answer questions about the Python standard library on this machine
	$(BIN)/millpond demo $(ARGS)

test: $(STAMP) ## the tests of millpond that need no GPU, network or service, and not long
	$(PYTEST) --override-ini=testpaths=tests $(FAST) $(ARGS)

test-integrations: $(STAMP) ## the same of the four packages for databases and frameworks
	$(PYTEST) --override-ini="testpaths=integrations/*/tests" $(FAST) $(ARGS)

test-all: $(STAMP) ## every test of the five; those that lack their device, network or service skip themselves
	$(PYTEST) $(ARGS)

coverage: $(STAMP) ## the branches that the fast tests of all five packages cover; the floor is in pyproject.toml
	$(PYTEST) $(FAST) --cov --cov-report=term $(ARGS)

fuzz: $(STAMP) ## storms of broken and hostile requests on servers of every kind of model, with figures (MILLPOND_STORM=40000)
	$(BIN)/python -m pytest tests/server/fuzz $(ARGS)

check: $(STAMP) ## format, lint, layering and types: what CI runs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy

format: $(STAMP) ## put the code in form
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

bench: export TORCH_ARGS := $(TORCH_ARGS)
bench: $(STAMP) ## run every script of benchmarks/; peers get environments of their own, results go to benchmarks/results/
	@$(if $(findstring --smoke,$(ARGS)),$(SMOKE),set -e; for script in $(BENCHMARKS); do $(call RUN,$$script); done)

notebooks: ## execute the notebooks
	@echo "There are no notebooks in this version."

test-gpu: ## the GPU tests, on a machine that may have nothing but torch, transformers, numpy and pytest
	PYTHONPATH=src $(or $(wildcard $(BIN)/python),$(PYTHON)) -m pytest -c tests/gpu/pytest.ini tests/gpu $(ARGS)

bench-gpu: ## the GPU benchmark, on a machine that may have nothing but torch, transformers and numpy
	PYTHONPATH=src $(or $(wildcard $(BIN)/python),$(PYTHON)) benchmarks/gpu.py --out $(GPU_RESULT) $(ARGS)

constraints: $(STAMP) ## write constraints.txt from what is installed
	$(PIP) freeze --exclude-editable | sed 's/+[a-z0-9.]*$$//' > constraints.txt

clean: ## remove what was built here, but for .venv
	rm -rf build dist .coverage .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis .benchmarks
	find src integrations tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
