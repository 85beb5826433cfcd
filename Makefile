# Every target sets up what it needs on its first use; Python >= 3.11 and make are enough.
#   make test ARGS="tests/train -x"    make demo SHORT=1    make demo PLOT=picture.png

VENV := .venv
NEWEST := .venv-newest
RUN := $(VENV)/bin/python
# A file's tests stay in one process, where they share what is compiled; files in their own
# order, as the last ones are short. A process that crashes ends the run: xdist waits forever
# for what it would have done.
WORKERS := -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0
# Most of a suite's time goes into compiling: these programs are compiled quickly. With QUICKLY= on
# the command line they are those that users have.
QUICKLY := JAX_DISABLE_MOST_OPTIMIZATIONS=1
# Tests start a hundred processes that import the package: where this is set, each compiles it anew.
export PYTHONDONTWRITEBYTECODE :=
PIP := -m pip install --quiet --disable-pip-version-check

.PHONY: help demo test test-all test-newest bench lint format types
.DEFAULT_GOAL := help

help:
	@echo "make demo         train on four unequal devices, plain pmap against elche_jax"
	@echo "make test         run the tests of every behaviour, in a few minutes"
	@echo "make test-all     run all tests: also the slow ones, further rows of the same"
	@echo "make test-newest  run all tests with the newest Python found, and its newest JAX"
	@echo "make bench        measure against hand-written loops"
	@echo "make lint         check style (make format repairs it)"
	@echo "make types        check types, strictly"
	@echo "make docs         build the documentation into site/; a warning is an error"

demo: $(VENV)/.installed
	$(RUN) examples/01_mixed_speeds.py $(if $(SHORT),--short) $(if $(PLOT),--plot $(PLOT))

test: $(VENV)/.installed
	$(QUICKLY) $(RUN) -m pytest -q $(WORKERS) -m "not slow" $(ARGS)

test-all: $(VENV)/.installed
	$(QUICKLY) $(RUN) -m pytest -q $(WORKERS) $(ARGS)

test-newest: $(NEWEST)/.installed
	$(QUICKLY) $(NEWEST)/bin/python -m pytest -q $(WORKERS) $(ARGS)

bench: $(VENV)/.installed
	$(RUN) benchmarks/import_time.py
	$(RUN) benchmarks/mixed_speeds.py $(ARGS)

lint: $(VENV)/.installed
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

format: $(VENV)/.installed
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

types: $(VENV)/.installed
	$(RUN) -m pyright --project .

.PHONY: docs
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

$(VENV)/.installed: pyproject.toml
	@echo "setting up $(VENV) (once; a minute or two)"
	test -x $(RUN) || { python=$$(.ci/find-python oldest 11) && "$$python" -m venv $(VENV); }
	$(RUN) $(PIP) -e ".[test,examples]"
	@touch $@

$(VENV)/.docs: $(VENV)/.installed
	$(RUN) $(PIP) -e ".[docs]"
	@touch $@

$(NEWEST)/.installed: pyproject.toml
	@echo "setting up $(NEWEST) (once; a minute or two)"
	test -x $(NEWEST)/bin/python || \
		{ python=$$(.ci/find-python newest 12) && "$$python" -m venv $(NEWEST); }
	$(NEWEST)/bin/python $(PIP) --upgrade jax flax optax numpy -e ".[test,examples]"
	@touch $@
