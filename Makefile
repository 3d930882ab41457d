# The project's own verbs. Each works on a fresh clone: .venv is made when it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: install demo test test-all check format clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: install
	$(BIN)/plait train --config examples/demo.toml

# Two workers: what needs ranks (they wait for each other much of the time) runs beside what needs none.
test: install
	$(BIN)/pytest -n 2 --dist loadgroup

test-all: install
	$(BIN)/pytest -n 2 --dist loadgroup -m ''

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) runs build .pytest_cache .mypy_cache .ruff_cache .hypothesis
