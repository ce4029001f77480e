# Everything here needs Python 3.11 or newer, git and make; the rest is installed into .venv from constraints.txt.
#
#   make install                           into .venv; then: source .venv/bin/activate
#   make serve  ARGS="MODEL --port 8000"   serve a model; without arguments, the bundled one
#   make test   ARGS="-k scheduler"        the tests, on all cores; `make test-slow`: those that take longer
#   make test-agents                       agents and clients of others, in environments of their own, against the server
#   make step-trace                        the files and functions that a request enters, with their lines
#   make lint                              ruff, mypy, and whether all tests import; `make format` mends what ruff can
#   make gpu   [PYTHON=python3]            what a GPU shows, and what fails there; with PYTHON, by that Python's packages
#   make bench-offline ARGS="--rounds 3"   speed without a server, beside other engines (see benchmarks/README.md)
#
# Where there is no GPU, PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu keeps CUDA from being downloaded.

SHELL := /bin/bash
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help install serve test test-slow test-agents lint format constraints gpu step-trace clean

help:
	@sed -n 's/^#   //p' Makefile

$(BIN)/python:
	@[ -n "$(PYTHON)" ] || { echo "make: Headway needs Python 3.11 or newer; no python3 on the PATH is new enough." \
		"Install one, or name it with PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("make: Headway needs Python 3.11 or newer;" \
		" $(PYTHON) is %d.%d. Name another with PYTHON=/path/to/python3" % v[:2])'
	@$(PYTHON) -m venv $(VENV)

# setuptools comes first and the build uses it, so that it too is the pinned one. `compat` puts the clone on the path:
# the finder of the default comes after it, and a script beside a clone named headway would import that folder.
$(VENV)/.installed-serve: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing Headway into $(VENV) ..."
	@$(PIP) setuptools
	@$(PIP) --no-build-isolation --config-settings editable_mode=compat --editable '.[serve]'
	@touch $@

# What is not compiled here, the first start compiles.
$(VENV)/.compiled: $(VENV)/.installed-serve
	@echo "Compiling CPU kernels, once on this machine ..."
	@$(BIN)/headway calibrate --kernels --json > /dev/null || true
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing Headway and its development tools into $(VENV) ..."
	@$(PIP) setuptools
	@$(PIP) --no-build-isolation --config-settings editable_mode=compat --editable '.[serve,test,dev]'
	@touch $@ $(VENV)/.installed-serve

install: $(VENV)/.compiled
	@echo "Headway is in $(VENV). In each new terminal: source $(BIN)/activate"

serve: $(VENV)/.compiled
	@exec $(BIN)/headway serve $(ARGS)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest $(ARGS)

test-slow: $(VENV)/.installed-dev
	HYPOTHESIS_PROFILE=explore $(BIN)/python -m pytest -m "slow or hypothesis" -n 0 --timeout 600 $(ARGS)

$(VENV)-%/.installed: tests/live/%.txt | $(BIN)/python
	@echo "Installing the clients of $< into $(@D) ..."
	@$(BIN)/python -m venv $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	@touch $@

test-agents: $(VENV)/.installed-dev $(VENV)-agents/.installed $(VENV)-openai2/.installed
	HEADWAY_AGENTS=$(VENV)-agents:$(VENV)-openai2 $(BIN)/python -m pytest -m slow -n 0 tests/live/test_agents.py $(ARGS)

lint: $(VENV)/.installed-dev
	@failed=0; for check in "ruff check ." "ruff format --check ." mypy; do \
		echo "$$check"; $(BIN)/$$check || failed=1; done; \
	echo "pytest --collect-only"; said=$$($(BIN)/python -m pytest --collect-only -q -n 0 2>&1) || \
		{ sed -n '/= ERRORS =/,$$p' <<< "$$said"; failed=1; }; exit $$failed

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Pins what is installed now; run it after changing a dependency. PyPI's torch stands for its CPU and CUDA builds alike.
constraints: $(VENV)/.installed-dev
	@{ echo "# Every package that make installs, by \`make constraints\`. The CUDA build of torch pins its own libraries."; \
	  $(BIN)/python -m pip freeze --all --exclude-editable | grep -vE '^(pip|headway)[= ]' | sed 's/+cpu$$//'; } > constraints.new
	@mv constraints.new constraints.txt

# A machine with a GPU may have no network, and a Python that has CUDA's torch: named, it is taken as it is.
ifneq ($(filter command environment,$(origin PYTHON)),)
gpu:
	$(PYTHON) -m benchmarks.gpu $(ARGS)
else
gpu: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.gpu $(ARGS)
endif

# What a reader opens to follow a request.
step-trace: $(VENV)/.installed-serve
	@$(BIN)/python -m benchmarks.step_trace

bench-%: $(VENV)/.installed-serve
	$(BIN)/python -m benchmarks.$* $(ARGS)

clean:
	rm -rf $(VENV) $(VENV)-agents $(VENV)-openai2 .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
