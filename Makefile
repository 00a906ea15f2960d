# make quickstart: set up, then train a small model in INT8 on this machine.   make test: set up, then all tests.
VENV := .venv
PY := $(VENV)/bin/python
BASE := $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

OLDEST_TRITON := 3.6.0

.PHONY: setup quickstart test test-full lint docs gpu-test compile-oldest clean

setup: $(VENV)/.installed

$(VENV)/.installed: requirements.txt requirements-dev.txt
	@test -n "$(BASE)" || { echo "error: Python 3.11 or newer is needed; install it and run make again." >&2; exit 2; }
	$(BASE) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@touch $@

quickstart: setup
	$(PY) tokenize_data.py --config configs/quickstart_data.json
	$(PY) llm_pretrain.py --config configs/quickstart.json --n_steps 80

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m codespell_lib
	$(PY) -m pyrefly check --python-interpreter-path $(PY) --output-format min-text

test: lint
	$(PY) -m pytest --numprocesses auto

# The documentation as a site in site/, which asks no other host for anything. A warning is an error.
docs: setup
	$(PY) -m pip install --quiet --disable-pip-version-check --upgrade --target .docs -r requirements-docs.txt
	PYTHONPATH=$(CURDIR)/.docs NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

# Every case of the slow sweeps too, of which `make test` runs a sample.
test-full: lint
	QTRAIN_FULL_SWEEP=1 $(PY) -m pytest --numprocesses auto

# The tests marked gpu, on a machine with an NVIDIA GPU; its workers share that GPU.
gpu-test: setup
	$(PY) -m pytest -m gpu --numprocesses auto

# Every kernel for sm_90 by the oldest Triton that is supported, which refuses some of what newer ones compile.
compile-oldest: setup
	$(PY) -m pip install --quiet --no-deps --upgrade --target .triton triton==$(OLDEST_TRITON)
	PYTHONPATH=.triton:. $(PY) -m tests.kernels.compile_kernels 90

clean:
	rm -rf $(VENV) .triton .docs site runs .pytest_cache .ruff_cache
