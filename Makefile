# make run: set up, then train privately without a server on embedded real data; make test: set up, check, test.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: run test check setup clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 or later is needed"'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[simulation,fast,features,tensorboard,dev]'
	touch $(STAMP)

setup: $(STAMP)

# Train by `flwr run`, then the same peers each alone, then compare; results in runs/<date and time>.
run: RUN := runs/$(shell date +%Y%m%d-%H%M%S)
run: $(STAMP)
	$(BIN)/privdec run scenarios/digits.yaml --runtime flower --out $(RUN)/digits
	$(BIN)/privdec run scenarios/digits-local.yaml --out $(RUN)/digits-local
	$(BIN)/privdec report $(RUN)/digits $(RUN)/digits-local --out $(RUN)/report.html

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: check
	$(BIN)/pytest

clean:
	rm -rf .venv runs .mypy_cache .ruff_cache .hypothesis
