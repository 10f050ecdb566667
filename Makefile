# Everything works on a fresh clone: each target makes the virtual environment it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.lowtide-installed
DOCS_VENV := .venv-docs
DOCS_STAMP := $(DOCS_VENV)/.lowtide-installed
# Neighbouring tests stay on one worker, where they share what was measured or solved once.
PYTEST_FLAGS ?= -n auto --dist worksteal

.PHONY: setup demo docs test test-core bench lint clean

setup: $(STAMP)

# torch comes first and pinned, so that no other package pulls a larger build of it.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable . --group dev
	touch $@

demo: setup
	$(BIN)/python examples/demo.py

# Each worker has a core; threads beside it would take turns with the other workers'.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_FLAGS)

# All that needs no torch; importing it there is an error.
test-core: setup
	$(BIN)/python -m pytest --core $(PYTEST_FLAGS)

bench: setup
	$(BIN)/python -m benchmarks

# The site reads docstrings without importing anything: its environment is small, and needs no torch.
docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --quiet --strict
	@echo "the site: build/site/index.html"

$(DOCS_STAMP): pyproject.toml
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	$(DOCS_VENV)/bin/python -m pip install --quiet --group docs
	touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) $(DOCS_VENV) dist build .mypy_cache .ruff_cache .pytest_cache
