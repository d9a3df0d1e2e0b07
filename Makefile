# Each target does everything by itself, set-up included. Needs Python 3.11 or newer, and nothing else. Modules are compiled
# when they are first imported (--no-compile): most that are installed never are.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: demo test lint types clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "fedsim needs Python 3.11 or newer; say: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[test]'
	touch $@

demo: $(VENV)/.installed  ## federated averaging on real handwritten digits
	$(BIN)/fedsim run $(ARGS)

lint: $(VENV)/.installed
	$(BIN)/ruff check .

types: $(VENV)/.installed
	$(BIN)/mypy --num-workers=2

test: lint types  ## lint, types, tests, doctests, notebooks
	$(BIN)/python -m pytest --numprocesses=logical --dist loadgroup $(ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache
