# Each target does everything itself, including the installation. It needs Python 3.11 or newer, and nothing else. Modules are
# compiled when they are first imported (--no-compile), because most of those that are installed never are. Without files of
# compiled modules, each of the many processes that tests start would compile all of them again, for several seconds.
unexport PYTHONDONTWRITEBYTECODE
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
ARGS ?=
# A commit whose tests passed, see CONTRIBUTING.md.
BASE ?= $(shell cat .ci/base)
PYTEST := $(BIN)/python -m pytest --numprocesses=logical --dist loadgroup

.PHONY: demo test test-affected test-all lint types docs clean

$(VENV)/.created:
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "fedsim needs Python 3.11 or newer; say: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.run: $(VENV)/.created pyproject.toml constraints.txt
	$(PIP) -e '.[run]'
	touch $@

$(VENV)/.test: $(VENV)/.run
	$(PIP) -e '.[test]'
	touch $@

$(VENV)/.docs: $(VENV)/.run
	$(PIP) -e '.[docs]'
	touch $@

# The compiler for TPUs lies beside the other packages, because JAX looks for a TPU wherever it finds it.
$(VENV)/.test-all: $(VENV)/.test
	$(PIP) --target $(VENV)/tpu-compiler libtpu
	touch $@

demo: $(VENV)/.run  ## federated averaging on real handwritten digits
	$(BIN)/fedsim run $(ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .

types: $(VENV)/.test
	$(BIN)/mypy --num-workers=2

test: lint types  ## lint, types, doctests, and the tests that matter most
	$(PYTEST) -m "not slow" $(ARGS)

test-affected: $(VENV)/.test-all  ## of the tests that `make test` leaves out, those that the changes since BASE may break
	tests=$$($(BIN)/python tests/affected.py "$(BASE)") && \
	if [ "$$tests" ]; then \
		$(PYTEST) --no-loadscope-reorder -m slow $(ARGS) $$tests || [ $$? = 5 ]; fi  # 5: none of them is slow

test-all: $(VENV)/.test-all  ## all tests that `make test` leaves out, notebooks included
	$(PYTEST) -m slow $(ARGS)

docs: $(VENV)/.docs  ## the site of the documentation, _site/html/index.html; a warning is an error
	$(BIN)/python docs/write_site.py _site/source
	$(BIN)/python -m sphinx --builder html --fail-on-warning --keep-going --quiet --jobs auto \
		--doctree-dir _site/doctrees $(ARGS) _site/source _site/html

clean:
	rm -rf $(VENV) _site .mypy_cache .pytest_cache .ruff_cache
