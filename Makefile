# demo: the answer of a chat model, and its speed.  test: the fast suite, test-long: the longer tests.  lint: ruff, pyright, layers.  paper: a PDF.
PYTHON ?= python3
VENV := .venv
CONSTRAINTS := constraints.txt
BIN = $(VENV)/bin
export PYTHONDONTWRITEBYTECODE :=# the tests start the command many times: let it keep its bytecode

.PHONY: demo test test-long test-oldest test-gpu site lint lint-style lint-types lint-layers bench audit paper clean

demo: $(VENV)/installed
	$(BIN)/foretoken demo

test: $(VENV)/installed  # three processes keep two cores busy, since some tests wait
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile

test-long: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "long and not slow"

test-oldest: export PYTEST_ADDOPTS := -W ignore::beartype.roar.BeartypeDecorHintPep585DeprecationWarning# of an old starlette
test-oldest:  # the fast suite with the oldest versions that pyproject.toml allows, in an environment of their own
	$(MAKE) test VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt

test-gpu: $(VENV)/installed  # where there is a GPU, and a torch for it
	$(BIN)/python -m pytest -m gpu

site: $(VENV)/site  # the pages, in site/
	$(BIN)/python -m mkdocs build --strict

audit: $(VENV)/installed
	$(BIN)/foretoken audit

bench: $(VENV)/installed
	$(BIN)/foretoken bench

paper: $(VENV)/typst
	$(BIN)/python -c 'import typst; typst.compile("docs/paper/paper.typ", output="docs/paper/paper.pdf", root="docs", ignore_system_fonts=True)'

lint: lint-style lint-types lint-layers  # may run at the same time: make --jobs=2 lint

lint-style: $(VENV)/linters
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint-types: $(VENV)/linters
	$(BIN)/pyright

lint-layers: $(VENV)/linters
	$(BIN)/lint-imports

$(VENV)/installed: pyproject.toml $(CONSTRAINTS)
	@echo "Making $(VENV): minutes, most of them for downloading and unpacking torch."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) --editable ".[test,transport,bench,serve]"
	touch $@

$(VENV)/linters: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) --editable ".[lint]"
	touch $@

$(VENV)/site: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) --editable ".[docs]"
	touch $@

$(VENV)/typst: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) --editable ".[paper]"
	touch $@

clean:
	rm -rf .venv .venv-oldest build dist site
