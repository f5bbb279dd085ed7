# `make demo` and `make test` are all that a fresh machine needs; both set up what they use.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest

.PHONY: setup demo test check bench soak test-docker clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	# The reference that the parity tests compare with; its own dependencies are far more than they need.
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps nemo-automodel==0.7.0
	touch $(STAMP)

demo: setup
	$(BIN)/headrace demo

test: setup
	$(PYTEST) -m "not soak and not docker and not gpu"

soak: setup
	$(PYTEST) -m "soak"

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup
	$(BIN)/headrace bench collate --json bench/results/collate.json
	$(BIN)/headrace bench handoff --json bench/results/handoff.json
	$(BIN)/headrace bench plan --json bench/results/plan.json
	$(BIN)/headrace bench ingest --json bench/results/ingest.json

test-docker: setup
	bash docker/test.sh

clean:
	rm -rf $(VENV) build dist out src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
