# demo: the answer of a chat model, and its speed.  test: the fast suite, test-long: the longer tests.  lint: ruff, pyright, layers.  paper: a PDF.
PYTHON ?= python3
BIN := .venv/bin
export PYTHONDONTWRITEBYTECODE :=# the tests start the command many times: let it keep its bytecode

.PHONY: demo test test-long test-gpu site lint lint-style lint-types lint-layers bench audit paper clean

demo: .venv/installed
	$(BIN)/foretoken demo

test: .venv/installed  # three processes keep two cores busy, since some tests wait
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile

test-long: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "long and not slow"

test-gpu: .venv/installed  # where there is a GPU, and a torch for it
	$(BIN)/python -m pytest -m gpu

site: .venv/site  # the pages, in site/
	$(BIN)/python -m mkdocs build --strict

audit: .venv/installed
	$(BIN)/foretoken audit

bench: .venv/installed
	$(BIN)/foretoken bench

paper: .venv/typst
	$(BIN)/python -c 'import typst; typst.compile("docs/paper/paper.typ", output="docs/paper/paper.pdf", root="docs", ignore_system_fonts=True)'

lint: lint-style lint-types lint-layers  # may run at the same time: make --jobs=2 lint

lint-style: .venv/linters
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint-types: .venv/linters
	$(BIN)/pyright

lint-layers: .venv/linters
	$(BIN)/lint-imports

.venv/installed: pyproject.toml constraints.txt
	@echo "Making .venv: minutes, most of them for downloading and unpacking torch."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[test,transport,bench,serve]"
	touch $@

.venv/linters: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[lint]"
	touch $@

.venv/site: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[docs]"
	touch $@

.venv/typst: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[paper]"
	touch $@

clean:
	rm -rf .venv build dist site
