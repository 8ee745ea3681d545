# make demo | serve | test | bench     from a bare clone; the environment is made on first use.
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python

.PHONY: env demo serve test lint bench load soak clean

env: $(VENV)/.ready

$(VENV)/.ready: requirements.txt pyproject.toml client/pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps nvidia-pytriton==0.7.0 -e . -e client
	touch $@

lint: env
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

demo: env
	$(PY) -m photon_backend.demo

# CHECKPOINT=dir DEVICE=cpu|cuda DTYPE=float32|bfloat16 FRONT_ENDS=n HOST=address HTTP_PORT= GRPC_PORT= METRICS_PORT= LOG_LEVEL=
serve: env
	$(PY) -m photon_backend.serve

# table and plot in out/; LOAD_SECONDS= of each row, LOAD= any option of benchmarks.load
load: env
	$(PY) -m benchmarks.load --seconds $(or $(LOAD_SECONDS),4) $(LOAD)

# SOAK_REQUESTS=, SOAK= any option of benchmarks.soak; an hour or less on two cores
soak: env
	$(PY) -m benchmarks.soak --requests $(or $(SOAK_REQUESTS),20000) $(SOAK)

# ratios of one run are what counts on a shared CPU; DEVICE=cuda on a GPU
bench: env
	$(PY) -m benchmarks.decode --device $(or $(DEVICE),cpu)

test: lint
	$(PY) -m pytest

clean:
	rm -rf $(VENV) build out
