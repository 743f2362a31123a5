# make demo | test | test-aot | lint | bench-quick | clean. Needs Python 3.11 or later, and makes its own .venv.

PYTHON ?= python3
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed

.PHONY: demo test test-aot lint bench-quick clean

demo: $(STAMP)
	$(BIN)/python examples/demo.py

test: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow and not aot"

# With the compilers of TPUs and NVIDIA GPUs (1.2 GB, no such device is needed); minutes a test.
test-aot: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,tpu,gpu]'
	$(BIN)/python -m pytest -m aot

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench-quick: $(STAMP)
	@set -e; for file in benchmarks/[a-z]*.py; do \
		echo "$$file --quick"; $(BIN)/python $$file --quick; \
	done

# Installed again whenever the dependencies change; the solver's kernels are compiled once, here.
$(STAMP): setup.cfg pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	$(BIN)/python -c 'from jaxscaler.solve import warm; warm()'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
