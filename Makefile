# Everything a newcomer needs: `make demo`, `make test`. Both make the virtual environment first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-all test-bare test-ray lint types docs bench clean

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch==2.13.0 setuptools
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	touch $@

demo: $(VENV)/ready
	$(BIN)/hocket compare -n 2 --strategies 'mirrored, central, local_sgd(period=16), asynchronous' \
		--threads 1 --until accuracy=0.97 --repeat 2 examples/digits.py --epochs 40 --seed '{seed}'

# Compiled once, or every process of a test would do it where PYTHONDONTWRITEBYTECODE is set.
test: $(VENV)/ready
	$(BIN)/python -m compileall -q src
	$(BIN)/python tests/halves.py

test-all: $(VENV)/ready
	$(BIN)/python tests/halves.py --all

# What `pip install .` brings must be enough: no extras, and so no numpy.
$(VENV)-bare/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)-bare
	$(VENV)-bare/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch==2.13.0 setuptools
	$(VENV)-bare/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-build-isolation --editable .
	touch $@

test-bare: $(VENV)-bare/ready
	$(VENV)-bare/bin/python -W 'ignore:Failed to initialize NumPy' tests/bare.py

# Ray in an environment of its own, on top of the other: it brings packages that nothing else needs.
$(VENV)-ray/ready: $(VENV)/ready
	$(PYTHON) -m venv $(VENV)-ray
	$(VENV)-ray/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt ray
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')')" \
		> "$$($(VENV)-ray/bin/python -c 'import site; print(site.getsitepackages()[0])')/below.pth"
	touch $@

test-ray: $(VENV)-ray/ready
	$(VENV)-ray/bin/python -m pytest -q tests/launch/test_ray.py

lint: $(VENV)/ready
	$(BIN)/ruff check .

types: $(VENV)/ready
	$(BIN)/mypy

# The site, into site/. A link or an anchor that leads nowhere is an error; with --quiet, --strict would not see them.
docs: $(VENV)/ready
	$(BIN)/python -m mkdocs build --strict --clean

bench: $(VENV)/ready
	$(BIN)/hocket bench allreduce
	$(BIN)/hocket bench step

clean:
	git clean -dfx
