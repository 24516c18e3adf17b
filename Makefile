# `make demo` and `make test` set everything up by themselves on a fresh machine.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Which JAX to install, e.g. JAX="jax==0.12.0.1"; empty: what pyproject.toml allows
# and BUILD.md's matrix names first. GPU=cuda12 or cuda13 installs JAX for that CUDA.
JAX ?= jax==0.11.2
GPU ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo cuda13)
EXTRAS := test$(if $(GPU),$(comma)$(GPU))
comma := ,

.PHONY: demo test test-all test-short test-gpu lint bench setup clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 12) else "jaxgemm needs Python 3.12 or newer (JAX 0.11 does); %s is Python %d.%d. Run: make PYTHON=python3.12" % (sys.executable, v[0], v[1]))'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e '.[$(EXTRAS)]' '$(JAX)'
	@touch $@

demo: setup
	$(BIN)/python -m experiments.run
	$(BIN)/python -m experiments.train_lm --steps=20

test: setup
	$(BIN)/python -m pytest -n auto --dist=worksteal -m 'not more'

test-all: setup
	$(BIN)/python -m pytest -n auto --dist=worksteal

# The short set: what an additional JAX version is held to.
test-short: setup
	$(BIN)/python -m pytest -n auto --dist=worksteal -m 'not slow'

# Several processes share the GPU: most of the time goes into compiling.
# XLA's results are only what ours are held against: tuning them would take minutes.
test-gpu: setup
	XLA_PYTHON_CLIENT_PREALLOCATE=false \
	XLA_FLAGS="--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false" \
	$(BIN)/python -m pytest -m gpu -n 8 --dist=loadgroup

bench: setup
	$(BIN)/python -m experiments.run --suite=issue2 --name=bench

lint: setup
	$(BIN)/python -m pip install --quiet ruff
	$(BIN)/ruff check .

clean:
	rm -rf $(VENV) build dist *.egg-info
