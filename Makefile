# make demo | serve | test | bench     from a bare clone; the environment is made on first use.
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python

.PHONY: env demo serve test lint bench load clean

env: $(VENV)/.ready

$(VENV)/.ready: requirements.txt pyproject.toml client/pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps -e . -e client
	touch $@

lint: env
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

test: lint
	$(PY) -m pytest

clean:
	rm -rf $(VENV) build out
