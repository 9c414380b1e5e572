# Every target does its own set-up in .venv, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Tests start some two hundred processes; without bytecode each would compile the project again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help check test test-all demo bench clean
.DEFAULT_GOAL := help

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

$(READY): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,dev]'
	@touch $@

# Type checkers and import-linter do not see setuptools' mapping of folders to packages: give them a link tree.
.types: moec
	@rm -rf .types && mkdir -p .types/moec
	@for f in moec/*; do case $$f in *__pycache__) ;; *) ln -s ../../$$f .types/moec/ ;; esac; done
	@for d in grammar passes codegen runtime; do ln -s ../../$$d .types/moec/$$d; done

check: $(READY) .types ## ruff, format, types, import rules, rooms
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	cd .types && ../$(BIN)/lint-imports --config ../pyproject.toml --no-cache
	$(BIN)/python tests/rooms.py

test: $(READY) ## the suite, 10 minutes on 2 cores
	$(BIN)/python -m pytest -n auto --maxprocesses 4

test-all: $(READY) .triton-3.6 ## every test, slow ones too; PART=ranks: one part of tests/parts.py
	$(BIN)/python tests/parts.py $(PART)

# The oldest Triton that moec supports, beside the one that torch asks for: kernels are compiled with both.
.triton-3.6: | $(READY)
	@rm -rf $@ $@.new
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@.new 'triton==3.6.0'
	@mv $@.new $@

demo: $(READY) ## compile, verify and train a small model on real text, under 4 minutes on 2 cores
	$(BIN)/python examples/demo.py $(if $(DATA),--data $(DATA))

bench: $(READY) ## every benchmark, one table each
	@for b in benchmarks/bench_*.py; do echo "== $$b"; $(BIN)/python $$b || exit 1; done

clean: ## remove what the targets made
	rm -rf $(VENV) .types .triton-3.6 .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info
