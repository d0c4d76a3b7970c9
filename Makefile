PYTHON ?= python3
export PATH := $(CURDIR)/.venv/bin:$(PATH)

.PHONY: repro test install

# The default run, ending with the comparison tables in reports/.
repro: .venv/installed
	dvc repro

# Lint, types, every test, the slow ones too.
test: .venv/installed
	ruff check .
	ruff format --check .
	mypy
	pytest -m "slow or not slow"

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	@echo "Installing into .venv: once, a few minutes."
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test]'
	touch $@
