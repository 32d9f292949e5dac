# Every target builds what it needs in .venv; PYTHON chooses the interpreter for that, nothing else is required.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Where the environment forbids to keep compiled Python, each of many processes compiles the same files again.
unexport PYTHONDONTWRITEBYTECODE

SIDE_BY_SIDE := -n 3 --dist loadscope --no-loadscope-reorder
PROTOS := $(wildcard proto/meridian/v1/*.proto)

.PHONY: demo test pytest check unit doctor soak bench-termination bench-scheduling bench-cache bench-delivery bench-kernels lint proto dist lock sbom \
	audit clean

demo: $(VENV)/ready
	$(BIN)/python -m tests.demo

# Three processes for two cores, since many tests wait; lint and types run beside them.
test: $(VENV)/ready
	@$(MAKE) --no-print-directory -j2 lint pytest

pytest: $(VENV)/ready
	$(BIN)/python -m pytest $(SIDE_BY_SIDE)

# The inner loop: no engine.
check: $(VENV)/ready
	@$(MAKE) --no-print-directory -j2 lint unit

unit: $(VENV)/ready
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -q tests/unit

# What some tests need and this machine does not have, and how to get it; installs nothing.
doctor:
	@test -x $(BIN)/python || { echo "there is no environment yet: make $(VENV)/ready makes it"; exit 1; }
	@$(BIN)/python -m tests.needed

# Every reasoning parser of the installed vLLM: what the agent finds, and whether vLLM agrees; ARGS: --save.
.PHONY: parsers
parsers: $(VENV)/ready
	@$(BIN)/python -m tests.parsers $(ARGS)

# vLLM's own tests of its scheduler, with the agent in front of every scheduler and without. Downloads vLLM's sources.
# ARGS: --vllm VERSION…, --tests PATH…
.PHONY: test-vllm
test-vllm: $(VENV)/ready
	$(BIN)/python -m tests.vllm_suite $(ARGS)

# Requests, faults and policies at random, 20 minutes; ARGS: --seconds, --seed, --clients, --out.
soak: $(VENV)/ready
	$(BIN)/python -m tests.soak $(ARGS)

# What ending thinking saves and costs; ARGS are its options.
bench-termination: $(VENV)/ready
	$(BIN)/python -m tests.bench.termination $(ARGS)

lint: $(VENV)/ready
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

proto: $(VENV)/ready
	$(BIN)/python -m tests.check_proto --write

# A release: the wheel, the same byte for byte for one commit; what the control plane's image installs, with hashes; its
# bill of materials; what is known against it.
RELEASE := build/release
dist: $(RELEASE)/ready
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(RELEASE)/bin/python -m hatchling build -t wheel -d dist

lock: $(RELEASE)/ready
	$(RELEASE)/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
		--custom-compile-command 'make lock' --extra control --extra traces -o deploy/requirements.lock pyproject.toml

# Of an environment with what is locked, for who needs whom is not in the lock.
sbom: $(RELEASE)/ready
	mkdir -p dist
	$(RELEASE)/bin/uv venv --quiet --clear build/locked
	$(RELEASE)/bin/uv pip install --quiet --python build/locked/bin/python --require-hashes -r deploy/requirements.lock
	$(RELEASE)/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
		-o dist/sbom.cdx.json build/locked/bin/python

audit: $(RELEASE)/ready
	$(RELEASE)/bin/pip-audit --strict --disable-pip --require-hashes -r deploy/requirements.lock

$(RELEASE)/ready: pyproject.toml
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python -m pip install --quiet --disable-pip-version-check '.[release]'
	touch $@

clean:
	rm -rf $(VENV) build dist


# ARGS: see `python -m tests.bench.scheduling --help`, for example --quick, or --save to replace what is in results/.
bench-scheduling: $(VENV)/ready
	$(BIN)/python -m tests.bench.scheduling $(ARGS)

bench-cache: $(VENV)/ready
	$(BIN)/python -m tests.bench.cache $(ARGS)

bench-delivery: $(VENV)/ready
	$(BIN)/python -m tests.bench.delivery $(ARGS)

.PHONY: bench-cost
bench-cost: $(VENV)/ready
	$(BIN)/python -m tests.bench.cost $(ARGS)

.PHONY: bench-faults
bench-faults: $(VENV)/ready
	$(BIN)/python -m tests.bench.faults $(ARGS)

# Needs a CUDA GPU, CuPy and a CUDA build of torch, so it runs in the Python that has them, for example that of a vLLM
# image: make bench-kernels GPU_PYTHON=python3
bench-kernels: $(if $(GPU_PYTHON),,$(VENV)/ready)
	PYTHONPATH=kernels $(or $(GPU_PYTHON),$(BIN)/python) -m tests.bench.kernels $(ARGS)
