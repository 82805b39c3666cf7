# make run: set up, then train privately without a server on embedded real data; make test: set up, check, test;
# make test-quick: a sample of the tests; make test-flower: tests on newer versions of Flower; make docs: set up, then
# build the site, site/index.html.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
DOCS_STAMP := .venv/.installed-docs
EXTRAS := simulation,plots,images,accounting,features,tensorboard,dicom,huggingface,onnx,watch,dev
# uv unpacks side by side and writes once: a minute where pip takes five. It does not read pip's settings: where only pip
# knows the index, pip installs. Python compiles what is imported; to compile all of torch beforehand would take minutes.
UV_INSTALL := $(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt
PIP_INSTALL := $(BIN)/python -m pip install --no-compile --quiet --disable-pip-version-check -c constraints.txt

.PHONY: run test test-quick test-flower check docs setup clean try-install peer-wheel try-peer

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 or later is needed"'
	$(PYTHON) -m venv .venv
	$(PIP_INSTALL) uv
	$(UV_INSTALL) -e '.[$(EXTRAS)]' || $(PIP_INSTALL) -e '.[$(EXTRAS)]'
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

# A sample of the tests for the inner loop, about two minutes.
test-quick: $(STAMP)
	$(BIN)/pytest --quick

test: check
	$(BIN)/pytest -n logical --maxprocesses 4 --maxschedchunk 16

# The environment has the oldest version of Flower that is supported; these are the newest one and a nightly build.
test-flower: $(STAMP)
	$(BIN)/python -m tools.flower_versions flwr==1.42.0 flwr-nightly==1.43.0.dev20261026

$(DOCS_STAMP): $(STAMP)
	$(UV_INSTALL) -e '.[docs]' || $(PIP_INSTALL) -e '.[docs]'
	touch $(DOCS_STAMP)

# mkdocs-material's notice about another project's plans is no warning about these pages.
docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html"

# Install the wheel from the index without extras into an environment of its own, and try it: some minutes, 6 GB. With
# FIRST=torch==2.13.0+cpu, where the index has that, beside torch's build for the CPU.
try-install: $(STAMP)
	$(BIN)/python -m tools.try_install $(FIRST)

# The wheel of flower-privdec-peer, for devices without torch, in dist/; and installed from the index and tried.
peer-wheel: $(STAMP)
	$(BIN)/python -m tools.peer_wheel dist

try-peer: $(STAMP)
	$(BIN)/python -m tools.try_install --peer

clean:
	rm -rf .venv runs site .mypy_cache .ruff_cache .hypothesis
