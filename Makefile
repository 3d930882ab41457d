# The project's own verbs. Each works on a fresh clone: .venv is made when it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help install demo test test-all test-share mutants versions check format docs docs-serve package clean

help:  ## list these verbs
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' Makefile

install: $(VENV)/.installed  ## make .venv, and install plait there with the tested versions of its dependencies

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: install  ## train a small GPT on four local ranks; one or two minutes on two CPU cores
	$(BIN)/plait train --config examples/demo.toml

# Tests start many processes, which would compile every module anew without __pycache__.
unexport PYTHONDONTWRITEBYTECODE

# Two workers, each with ranks of its own, and with files of its own (tests/conftest.py).
test: install  ## run the tests, with few examples of each property; print the ten slowest
	$(BIN)/pytest -n 2 --durations 10 --durations-min 1

# Those marked gpu: cpu, with Gloo, or cuda:8, of which 8 may share a GPU.
GPU_TESTS_ON ?= cpu
test-all: install  ## run the tests with all examples and the full products, those of GPUs on GPU_TESTS_ON=cpu
	$(BIN)/pytest -n 2 --durations 10 --durations-min 1 -m '' --gpu-tests-on $(GPU_TESTS_ON)

SEED ?= 0
test-share: install  ## run a twentieth of the full products, chosen by SEED=..., for at most three minutes
	$(BIN)/pytest -n 2 -m full --twentieth $(SEED)

COUNT ?= 60
mutants: install  ## change COUNT=... random lines of src, chosen by SEED=..., and see which the tests notice; ten minutes for 70
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt pytest-cov
	$(BIN)/python benchmarks/mutation/run.py --seed $(SEED) --count $(COUNT)

# Interpreters, by default that of .venv; the environments take several GB each.
PYTHONS ?= $(BIN)/python
versions: install  ## run the tests with the oldest and newest dependencies, on PYTHONS="python3.12 ..."
	$(BIN)/python tests/versions.py --python $(PYTHONS)

check: install docs  ## check format, lint and types, and that the docs build without warnings
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: install  ## format the code, and mend what ruff can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Without --quiet, which would hide the warnings from --strict.
docs docs-serve: export NO_MKDOCS_2_WARNING = 1

docs: install  ## build the site of the docs into site/, without warnings
	$(BIN)/mkdocs build --strict

docs-serve: install  ## serve the site on 127.0.0.1:8000, and build it again when a page changes
	$(BIN)/mkdocs serve

package: install  ## build dist/plait-*.whl and .tar.gz, install the wheel into an empty environment, try it there
	.ci/package

clean:  ## remove .venv, runs/ and everything that tools leave behind
	rm -rf $(VENV) runs build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
