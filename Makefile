# The ways into the project. `make help` lists them.
#
#   DEVICE=auto|cpu|cuda   which torch to install (auto: cuda where nvidia-smi lists a GPU)
#   PYTHON=python3.12      which interpreter to build .venv with
#   TORCH_INDEX=…          an index that holds a CPU-only torch, where the configured one serves the CUDA build
#   PYTEST_ARGS=…          more words for pytest, as in PYTEST_ARGS="-k vocabulary"
#   PYTEST_WORKERS=2       processes that share the test files; 0 runs them in pytest's own

DEVICE ?= auto
PYTHON ?= python3
TORCH_INDEX ?=
PYTEST_ARGS ?=
PYTEST_WORKERS ?= 2
SHARED := -n $(PYTEST_WORKERS) --dist loadfile
export DEVICE PYTHON TORCH_INDEX

BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all lint format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

install: ## build .venv with pinned packages; does nothing when it is up to date
	@requirements/install

demo: install ## the main job on synthetic data: preprocess, train on 2 ranks, evaluate, kill and resume
	@$(BIN)/dlrm-scale demo --out data/demo

lint: install ## formatting, lint, types and layers
	@$(BIN)/python -m ruff check .
	@$(BIN)/python -m ruff format --check .
	@$(BIN)/python -m mypy
	@$(BIN)/lint-imports

test: lint ## all checks and the fast tests
	@$(BIN)/python -m pytest -m "not slow and not gpu" $(SHARED) $(PYTEST_ARGS)

test-all: lint ## all checks and all tests; those that need a GPU are skipped without one
	@$(BIN)/python -m pytest $(SHARED) $(PYTEST_ARGS)

format: install ## put the code into the project's format
	@$(BIN)/python -m ruff check --fix .
	@$(BIN)/python -m ruff format .

clean: ## remove .venv, caches and what the demo made
	rm -rf .venv build dist data/demo .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache *.egg-info
	find . -path ./.git -prune -o -type d -name __pycache__ -print0 | xargs -0 rm -rf
