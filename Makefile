# What a user and a developer do with this repository. Everything is installed into VENV, in stages that are stamped: a second
# run does only what has changed. `make help` lists the targets.

VENV ?= .venv
# The torch that is installed first, so that no other package chooses it.
TORCH ?= 2.13.0
# What `make demo` runs, after $(VENV)/bin/protrain.
DEMO ?= train --model gpt2-demo --memory 340MiB --seq 128 --batch 1 --steps 50 --out demo-model
# What `make bench` runs, after $(VENV)/bin/protrain bench.
BENCH ?= step
# How long `make soak` tries each kind of random input.
SOAK_SECONDS ?= 3600
soak: export PROTRAIN_FUZZ_SECONDS = $(SOAK_SECONDS)
# More words for pytest: make test PYTEST="-k adam".
PYTEST ?=
# How many processes `make test` shares the test files among; 0: one, which is this one, for a debugger.
WORKERS ?= 2
# The interpreter that VENV is made from: the one it already has, else python3.
ifeq ($(origin PYTHON),undefined)
  PYTHON := $(if $(wildcard $(VENV)/bin/python),$(VENV)/bin/python,python3)
endif

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-input
RUN_KEY := $(shell cat requirements.txt | sha256sum | cut -c1-12)
DOCS_KEY := $(shell cat requirements-docs.txt | sha256sum | cut -c1-12)
DEV_KEY := $(shell cat requirements-dev.txt | sha256sum | cut -c1-12)
SETUP_KEY := $(shell cat pyproject.toml setup.py | sha256sum | cut -c1-12)
VENV_STAMP := $(VENV)/.protrain-venv
TORCH_STAMP := $(VENV)/.protrain-torch-$(TORCH)
RUN_STAMP := $(VENV)/.protrain-run-$(RUN_KEY)
DEV_STAMP := $(VENV)/.protrain-dev-$(DEV_KEY)
DOCS_STAMP := $(VENV)/.protrain-docs-$(DOCS_KEY)
SETUP_STAMP := $(VENV)/.protrain-setup-$(SETUP_KEY)
C_FILES = $(shell find csrc tests/c -name '*.[ch]' -o -name '*.cpp' -o -name '*.cu' | LC_ALL=C sort)

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo build test lint format docs bench soak dist clean preflight

help: ## say what can be made
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' Makefile
	@echo 'PYTHON=python3.12 chooses the interpreter, VENV=folder where packages go, TORCH=2.13.0 the version of torch'

demo: build ## install what is needed into .venv, build, and train a model that does not fit its memory
	@$(BIN)/protrain $(DEMO)

build: $(RUN_STAMP) ## build protrain in place and make the command .venv/bin/protrain
	@$(BIN)/python setup.py -q build_ext --inplace
	@test -e $(SETUP_STAMP) || { rm -f $(VENV)/.protrain-setup-* && $(PIP) --no-build-isolation --no-deps -e . && touch $(SETUP_STAMP); }

test: build lint ## lint, then every test
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST)

lint: $(RUN_STAMP) $(DEV_STAMP) ## check style and types; changes nothing
	@$(BIN)/ruff check --quiet --output-format concise .
	@$(BIN)/ruff format --quiet --check . || { $(BIN)/ruff format --check --output-format concise . ; echo 'protrain: make format puts this right'; exit 1; }
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/clang-format --dry-run -Werror --ferror-limit=3 $(C_FILES) || { echo 'protrain: make format puts this right'; exit 1; }
	@echo 'lint: ruff, mypy and clang-format have nothing to say'

format: $(DEV_STAMP) ## put style right, in place
	@$(BIN)/ruff check --quiet --output-format concise --fix --exit-zero . ; $(BIN)/ruff format --quiet .
	@$(BIN)/clang-format -i $(C_FILES)

docs: $(DOCS_STAMP) ## build the documentation into build/site; a dead link is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
	@echo 'docs: build/site/index.html'

bench: build ## measure this machine and protrain on it
	@$(BIN)/protrain bench $(BENCH)

soak: build $(DEV_STAMP) ## faults, crashes, leaks and random input for a night; SOAK_SECONDS=60 shortens it
	@$(BIN)/python tests/soak.py
	@PROTRAIN_FUZZ_SECONDS=$$(($(SOAK_SECONDS) / 10)) $(BIN)/python tests/sanitized.py

dist: $(RUN_STAMP) $(DEV_STAMP) ## make the source archive and, from it, the wheel, in dist/
	@mkdir -p build && rm -rf dist
	@$(BIN)/python -m build --no-isolation > build/dist.log 2>&1 || { cat build/dist.log; exit 1; }
	@ls -sh dist

clean: ## remove what was built; .venv stays
	rm -rf build dist *.egg-info protrain/*.so protrain/*.new .mypy_cache .pytest_cache .ruff_cache
	find protrain tests -name __pycache__ -type d -exec rm -rf {} +
	rm -f $(VENV)/.protrain-setup-*

# ---- stages ----

# One line for what a machine lacks, before anything is downloaded.
preflight:
	@command -v $(PYTHON) > /dev/null || { echo 'protrain: $(PYTHON) is missing: install Python 3.11 or newer, or make PYTHON=another' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "protrain: Python 3.11 or newer is needed, $(PYTHON) is `$(PYTHON) -V 2>&1`: make PYTHON=python3.12, or another" >&2; exit 1; }
	@$(PYTHON) setup.py preflight $(VENV)

$(VENV_STAMP): | preflight
	@echo 'protrain: making $(VENV)'
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(TORCH_STAMP): $(VENV_STAMP) | preflight
	@echo 'protrain: installing torch $(TORCH), which is large; this happens once'
	@$(PIP) torch==$(TORCH)
	@rm -f $(VENV)/.protrain-torch-* && touch $@

# setuptools builds; torch is named again so that nothing replaces it.
$(RUN_STAMP): $(TORCH_STAMP) | preflight
	@echo 'protrain: installing what it runs with'
	@$(PIP) torch==$(TORCH) 'setuptools>=77' -r requirements.txt
	@rm -f $(VENV)/.protrain-run-* && touch $@

$(DEV_STAMP): $(TORCH_STAMP) | preflight
	@echo 'protrain: installing what tests and lint need'
	@$(PIP) torch==$(TORCH) -r requirements-dev.txt
	@rm -f $(VENV)/.protrain-dev-* && touch $@

# What builds the documentation needs nothing of torch.
$(DOCS_STAMP): $(VENV_STAMP) | preflight
	@echo 'protrain: installing what the documentation is built with'
	@$(PIP) -r requirements-docs.txt
	@rm -f $(VENV)/.protrain-docs-* && touch $@
