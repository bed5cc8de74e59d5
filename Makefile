# Two commands work on a fresh machine with Linux and Python >= 3.11:
#
#   make demo    the daemon, an engine killed in mid-flight, and its prompt served from the cache again
#   make test    the default test suite
#
# make test-all runs every test: full (what the default suite leaves out), slow (tests that take long, or measure time),
# compiled (the core's tests on a compiled core), mutants (mistakes that tests must catch), vllm and sglang (real vLLM
# servers and real SGLang processes on the daemon, in environments of 2 and 3 GB), oldest (the default suite with the
# oldest versions of other packages that pyproject.toml allows, in an environment of its own).
#
# Others: make env (.venv, which these make first), lock (newer versions of what is in it), lint, format, bench
# (benchmarks), vllm-env (what real vLLM servers run in), bench-vllm (figures with real vLLMs), replay (recorded
# conversations against vLLM, with a figure), docker (the image and the Compose file, by a Docker engine), docs (the documents as a site, in build/site), reference (pages of the SDK's
# docstrings, in build/reference), clean.
#
# PYTHON       interpreter to make the environment with   make test PYTHON=python3.12
# MUTANTS      names of mutants, or --passed if all tests have passed just now   make mutants MUTANTS=--passed
# PART         K/N: of full, slow, vllm and mutants, every Nth file or mutant from the Kth on   make slow PART=0/2
# VLLM         0.32, or 0.33: whose code vLLM's tests run, around the CPU kernels of 0.32   make vllm VLLM=0.33
# TORCH_INDEX  package index to take torch from           make env TORCH_INDEX=URL
# REPLAY       options of the replay                      make replay REPLAY='--model tiny --requests 60'

PYTHON ?= python3
TORCH_VERSION ?= 2.13.0
TORCH_INDEX ?=
PART ?= 0/1
VLLM ?= 0.32

VENV := .venv
VLLM_VENV := .venv-vllm$(if $(filter-out 0.32,$(VLLM)),-$(VLLM))
VLLM_CODE := $(if $(filter-out 0.32,$(VLLM)),--code vllm==$(VLLM).0)
SGLANG_VENV := .venv-sglang
OLDEST_VENV := .venv-oldest
BIN := $(VENV)/bin
STAMP := $(VENV)/.complete
PIP := $(BIN)/python -m pip --disable-pip-version-check
LOCK := tests/environment.lock.txt
VLLM_STAMP := $(VLLM_VENV)/.complete
VLLM_LOCK := $(wildcard tests/vllm/environment/*.lock.txt)
SGLANG_STAMP := $(SGLANG_VENV)/.complete
SGLANG_LOCK := $(wildcard tests/sglang/environment/*.lock.txt)
CLIENT := $(shell find kvcached_client -name build -prune -o -name '*.py' -print -o -name '*.c' -print) kvcached_client/pyproject.toml

# A module is compiled once, not at every start of a daemon, whatever the shell that calls says.
unexport PYTHONDONTWRITEBYTECODE
# The tests' tensors are tiny: threads that wait for each other cost more than they compute.
test full slow compiled oldest: export OMP_NUM_THREADS := 1

.DEFAULT_GOAL := help
.PHONY: help env lock demo test test-all full compiled oldest slow mutants lint format bench vllm vllm-env bench-vllm sglang sglang-env docker replay docs reference clean

help:
	@sed -n '/^#/!q;s/^# \{0,1\}//p' Makefile

env: $(STAMP)

# torch comes first and by itself: then nothing later can replace it by another build.
$(STAMP): pyproject.toml kvcached_client/pyproject.toml $(LOCK)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "kvcached needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)." >&2; \
	    echo "Name another one: make $(or $(MAKECMDGOALS),env) PYTHON=python3.12" >&2; exit 1; }
	@rm -f $(STAMP)
	@echo "==> environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { \
	    echo "$(PYTHON) has no venv module; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@echo "==> torch $(TORCH_VERSION) (large: minutes on a slow line)"
	@$(PIP) install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==$(TORCH_VERSION)
	@echo "==> kvcached and its development tools"
	@$(PIP) install --quiet --constraint $(LOCK) -e ./kvcached_client -e '.[dev,examples]'
	@touch $(STAMP)
	@echo "==> environment complete"

# The newest versions that pyproject.toml allows, written down: run everything with them before they are committed.
lock: env
	@$(PIP) install --quiet --upgrade --upgrade-strategy eager torch==$(TORCH_VERSION) -e ./kvcached_client -e '.[dev,examples]'
	@head -2 $(LOCK) >$(LOCK).new
	@$(PIP) freeze --exclude-editable | grep -v '^torch==' >>$(LOCK).new
	@mv $(LOCK).new $(LOCK)

demo: env
	@$(BIN)/kvcached demo

# A daemon's start keeps one core waiting for the other; a file's tests stay together, for they share daemons.
test: env
	@$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile

test-all: test full compiled oldest mutants slow vllm sglang

full: env
	@$(BIN)/python -m pytest tests -m "full and not slow and not vllm and not sglang and not docker" --part $(PART) \
	    --numprocesses auto --maxprocesses 4 --dist loadfile

slow: env
	@$(BIN)/python -m pytest tests -m slow --numprocesses 2 --dist loadfile --part $(PART)

# A copy, so that what is compiled hides no sources here.
compiled: env
	@rm -rf build/compiled && mkdir -p build/compiled
	@cp -r benchmarks configs examples kvcached kvcached_client tests LICENSE README.md pyproject.toml setup.py build/compiled
	@cd build/compiled && KVCACHED_COMPILE=1 ../../$(BIN)/python setup.py --quiet build_ext --inplace --parallel 2
	@cd build/compiled && ../../$(BIN)/python -m pytest -m "not full and not slow and not vllm and not sglang and not docker and not interpreted" \
	    --numprocesses auto --maxprocesses 4 tests/core tests/simulation tests/service
	@cd build/compiled && ../../$(BIN)/python -m kvcached demo

# Tools that judge the code ask for newer versions: their tests are left out.
oldest: $(OLDEST_VENV)/.complete
	@$(OLDEST_VENV)/bin/python -m pytest --numprocesses auto --maxprocesses 4 tests --ignore tests/project

$(OLDEST_VENV)/.complete: pyproject.toml kvcached_client/pyproject.toml tests/project/oldest_versions.py | $(STAMP)
	@rm -rf $(OLDEST_VENV)
	@$(PYTHON) -m venv $(OLDEST_VENV)
	@echo "==> oldest versions of other packages in $(OLDEST_VENV)"
	@$(OLDEST_VENV)/bin/python -m pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==$(TORCH_VERSION)
	@$(OLDEST_VENV)/bin/python -m pip install --quiet --constraint $(LOCK) -e ./kvcached_client -e '.[dev,examples]'
	@$(OLDEST_VENV)/bin/python -m pip install --quiet $$($(BIN)/python -m tests.project.oldest_versions)
	@touch $@

mutants: env
	@$(BIN)/python -m tests.mutants.run --part $(PART) $(MUTANTS)

lint: env
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pre-commit validate-config

format: env
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: env
	$(BIN)/python -m benchmarks

bench-vllm: env vllm-env
	VLLM_VENV=$(VLLM_VENV) $(BIN)/python -m benchmarks vllm vllm-queue vllm-hits

# Recorded conversations against real vLLM servers, with and without kvcached; writes docs/figures/replay-small.svg.
replay: env vllm-env
	@$(PIP) install --quiet -e '.[plots]'
	VLLM_VENV=$(VLLM_VENV) $(BIN)/python -m benchmarks replay $(REPLAY)

# vLLM has an environment of its own: its versions are pinned, and the client's wheel must not change one of them.
vllm-env: $(VLLM_STAMP)

$(VLLM_STAMP): tests/vllm/environment/build.py $(VLLM_LOCK) $(CLIENT) | $(STAMP)
	@$(BIN)/python -m tests.vllm.environment.build $(VLLM_VENV) $(VLLM_CODE) \
	    $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX))
	@touch $@

vllm: env vllm-env
	@VLLM_VENV=$(VLLM_VENV) $(BIN)/python -m pytest tests -m vllm --part $(PART)

# SGLang has one as well.
sglang-env: $(SGLANG_STAMP)

$(SGLANG_STAMP): tests/vllm/environment/build.py $(SGLANG_LOCK) $(CLIENT) | $(STAMP)
	@$(BIN)/python -m tests.vllm.environment.build $(SGLANG_VENV) --lock $(SGLANG_LOCK) \
	    $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX))
	@touch $@

sglang: env sglang-env
	@$(BIN)/python -m pytest tests -m sglang

# Needs a Docker engine with Compose 2.17, and pulls python:3.12-slim. Nothing else runs these tests.
docker: env
	@$(BIN)/python -m pytest tests/docker -m docker

# Strictly: a broken link or anchor, a page outside the navigation, and a page that needs another host fail.
docs: env
	@$(PIP) install --quiet --constraint $(LOCK) -e '.[docs]'
	@$(BIN)/python -m tests.project.site_pages build/site
	@echo "==> build/site/index.html"

reference: env
	@$(PIP) install --quiet --constraint $(LOCK) -e '.[docs]'
	@$(BIN)/python -m tests.project.reference_pages build/reference
	@echo "==> build/reference/index.html"

clean:
	rm -rf $(VENV) .venv-vllm* $(SGLANG_VENV) $(OLDEST_VENV) build dist *.egg-info kvcached_client/build kvcached_client/*.egg-info kvcached_client/*.so
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find kvcached kvcached_client benchmarks examples tests -name __pycache__ -type d -prune -exec rm -rf {} +
