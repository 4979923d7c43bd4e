# Everything a newcomer needs: `make demo`, `make test`. Both make the virtual environment first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-all lint types bench clean

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch==2.13.0 setuptools
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	touch $@

demo: $(VENV)/ready
	$(BIN)/python examples/demo.py

# Compiled once, or every process of a test would do it where PYTHONDONTWRITEBYTECODE is set.
test: $(VENV)/ready
	$(BIN)/python -m compileall -q src
	$(BIN)/python tests/halves.py

test-all: $(VENV)/ready
	$(BIN)/python tests/halves.py --all

lint: $(VENV)/ready
	$(BIN)/ruff check .

types: $(VENV)/ready
	$(BIN)/mypy

bench: $(VENV)/ready
	$(BIN)/hocket bench allreduce
	$(BIN)/hocket bench step

clean:
	git clean -dfx
