# Every target builds what it needs in .venv; PYTHON chooses the interpreter for that, nothing else is required.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Where the environment forbids to keep compiled Python, each of many processes compiles the same files again.
unexport PYTHONDONTWRITEBYTECODE

SIDE_BY_SIDE := -n 3 --dist loadscope --no-loadscope-reorder
PROTOS := $(wildcard proto/meridian/v1/*.proto)

# make alone says what there is.
.PHONY: help
help: ## this list
	@sed -n 's/^\([a-z][a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | sort | awk -F'\t' '{ printf "%-18s %s\n", $$1, $$2 }'

.PHONY: demo test pytest check unit doctor soak bench-termination bench-scheduling bench-cache bench-delivery bench-kernels lint proto dist lock sbom \
	audit clean

demo: $(VENV)/ready ## the main job end to end: control plane, a real engine, live requests, a summary
	$(BIN)/python -m tests.demo

# Three processes for two cores, since many tests wait; lint and types run beside them.
test: $(VENV)/ready ## all tests, with lint and types beside them
	@$(MAKE) --no-print-directory -j2 lint pytest

pytest: $(VENV)/ready
	$(BIN)/python -m pytest $(SIDE_BY_SIDE)

# The inner loop: no engine.
check: $(VENV)/ready ## lint, types and unit tests: the inner loop, no engine
	@$(MAKE) --no-print-directory -j2 lint unit

unit: $(VENV)/ready
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -q tests/unit

# What some tests need and this machine does not have, and how to get it; installs nothing.
doctor: ## what some tests need and this machine lacks, and how to get it; installs nothing
	@test -x $(BIN)/python || { echo "there is no environment yet: make $(VENV)/ready makes it"; exit 1; }
	@$(BIN)/python -m tests.needed

# Every reasoning parser of the installed vLLM: what the agent finds, and whether vLLM agrees; ARGS: --save.
.PHONY: parsers
parsers: $(VENV)/ready ## what the agent finds for every reasoning parser of the installed vLLM
	@$(BIN)/python -m tests.parsers $(ARGS)

# vLLM's own tests of its scheduler, with the agent in front of every scheduler and without. Downloads vLLM's sources.
# ARGS: --vllm VERSION…, --tests PATH…
.PHONY: test-vllm
test-vllm: $(VENV)/ready ## vLLM's own scheduler tests, with the agent in front and without
	$(BIN)/python -m tests.vllm_suite $(ARGS)

# Requests, faults and policies at random, 20 minutes; ARGS: --seconds, --seed, --clients, --out.
soak: $(VENV)/ready ## requests, faults and policies at random, 20 minutes
	$(BIN)/python -m tests.soak $(ARGS)

# What ending thinking saves and costs; ARGS are its options.
bench-termination: $(VENV)/ready ## what ending thinking saves and costs
	$(BIN)/python -m tests.bench.termination $(ARGS)

lint: $(VENV)/ready ## ruff, mypy, the layers of imports, generated protobuf code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m tests.check_proto

# Some CPU wheels of vLLM pull CUDA builds of torchvision and friends that break the import of transformers models.
# Text serving needs none of them, so they go, only where the import really fails.
$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[cpu,control,dev]'
	$(BIN)/python -c 'from transformers import Qwen3ForCausalLM' 2>/dev/null || \
		$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(BIN)/python -c 'from transformers import Qwen3ForCausalLM'
	touch $@

proto: $(VENV)/ready ## generate the protobuf code anew
	$(BIN)/python -m tests.check_proto --write

# A release: the wheel, the same byte for byte for one commit; what the control plane's image installs, with hashes; its
# bill of materials; what is known against it.
RELEASE := build/release
dist: $(RELEASE)/ready ## the wheel, the same byte for byte for one commit
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(RELEASE)/bin/python -m hatchling build -t wheel -d dist

lock: $(RELEASE)/ready ## what the control plane's image installs, with hashes
	$(RELEASE)/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
		--custom-compile-command 'make lock' --extra control --extra traces -o deploy/requirements.lock pyproject.toml

# Of an environment with what is locked, for who needs whom is not in the lock.
sbom: $(RELEASE)/ready ## the bill of materials of what is locked
	mkdir -p dist
	$(RELEASE)/bin/uv venv --quiet --clear build/locked
	$(RELEASE)/bin/uv pip install --quiet --python build/locked/bin/python --require-hashes -r deploy/requirements.lock
	$(RELEASE)/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
		-o dist/sbom.cdx.json build/locked/bin/python

audit: $(RELEASE)/ready ## what is known against what is locked
	$(RELEASE)/bin/pip-audit --strict --disable-pip --require-hashes -r deploy/requirements.lock

$(RELEASE)/ready: pyproject.toml
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python -m pip install --quiet --disable-pip-version-check '.[release]'
	touch $@

clean: ## remove environments and build folders
	rm -rf $(VENV) build dist


# ARGS: see `python -m tests.bench.scheduling --help`, for example --quick, or --save to replace what is in results/.
bench-scheduling: $(VENV)/ready ## how answers stream under load, governed and not
	$(BIN)/python -m tests.bench.scheduling $(ARGS)

bench-cache: $(VENV)/ready ## what eviction tiers save
	$(BIN)/python -m tests.bench.cache $(ARGS)

bench-delivery: $(VENV)/ready ## how fast a policy reaches a fleet
	$(BIN)/python -m tests.bench.delivery $(ARGS)

.PHONY: bench-cost
bench-cost: $(VENV)/ready ## what the agent costs a step
	$(BIN)/python -m tests.bench.cost $(ARGS)

.PHONY: bench-faults
bench-faults: $(VENV)/ready ## throughput while faults last and after
	$(BIN)/python -m tests.bench.faults $(ARGS)

# Needs a CUDA GPU, CuPy and a CUDA build of torch, so it runs in the Python that has them, for example that of a vLLM
# image: make bench-kernels GPU_PYTHON=python3
bench-kernels: $(if $(GPU_PYTHON),,$(VENV)/ready)
	PYTHONPATH=kernels $(or $(GPU_PYTHON),$(BIN)/python) -m tests.bench.kernels $(ARGS)
