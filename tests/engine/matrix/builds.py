"""The engines of the matrix: vLLM's runners and schedulers, and the features that can be switched on in each.

The module owns the arguments and the environment of each build. The module imports no vLLM, so builds are known without
vLLM.
"""

from __future__ import annotations

import importlib.metadata
import os
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from tests import needed
from tests.engine import ENGINE_ARGS
from tests.engine.matrix import grown
from tests.engine.matrix.connectors import PATH, RECORDED
from tests.processes import MARKED, MODEL, ROOT, free_port

LORA = {"enable_lora": True, "max_lora_rank": 8}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
# vLLM's asynchronous scheduling needs drafts made on the worker, where only the worker knows them.
NGRAM_THERE = {**NGRAM, "method": "ngram_gpu"}
INTERPRETER = {
    "TRITON_INTERPRET": "1",
    "PYTHONPATH": os.pathsep.join(
        [str(Path(__file__).parent.parent / "interpreter"), *filter(None, [os.environ.get("PYTHONPATH")])]
    ),
}


def _made_for_gpus() -> bool:
    try:
        return "cpu" not in importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return False


# Whether this Python's vLLM is built for GPUs; if so, it runs without patches.
ON_GPU = _made_for_gpus()


@dataclass(frozen=True)
class Build:
    """One engine. `shown` is its column in the table; builds of one column differ in the features that are switched
    on."""

    name: str
    shown: str
    args: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    asynchronous: bool = False
    v2: bool = False
    # Whether the build needs no stock engine beside it, because its output is scripted, or is compared with its own
    # output under another policy.
    alone: bool = False
    # The real vocabulary, and the rows of its model; empty and 0 for the model's own.
    vocabulary: str = ""
    size: int = 0

    def engine_args(self) -> dict[str, Any]:
        # Two engines share a GPU, so each gets the same part of its memory, whatever its neighbour has taken already.
        memory = {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1 << 30}
        there = {"async_scheduling": self.asynchronous, **memory} if ON_GPU else {}
        model = {"model": os.environ[grown.FOLDER]} if self.vocabulary else {}
        return {**ENGINE_ARGS, "max_logprobs": -1, **there, **model, **self.args}

    def environment(self) -> dict[str, str]:
        # On a GPU, Triton's attention multiplies float32 with fewer bits unless it is told not to.
        triton = {"TRITON_F32_DEFAULT": "ieee"} if ON_GPU else INTERPRETER if self.v2 else {}
        return {"VLLM_USE_V2_MODEL_RUNNER": str(int(self.v2)), **triton, **self.env}

    def lacks(self) -> str:
        """Return what this Python lacks for the build and how to get it, or an empty string."""
        if self.vocabulary and not needed.VOCABULARIES.found():
            return needed.VOCABULARIES.reason
        return needed.NIXL.reason if NIXL.items() <= self.env.items() and not needed.NIXL.found() else ""

    def runs_here(self) -> bool:
        """Return whether the build can run here; two ranks would need two GPUs, which has not been tried."""
        return not (ON_GPU and "tensor_parallel_size" in self.args) and not self.lacks()


def _marked(
    name: str,
    shown: str,
    *,
    asynchronous: bool = False,
    v2: bool = False,
    **args: Any,
) -> Build:
    """Return a build with a model without weights, whose markers take several tokens."""
    model = {"model": str(MARKED), "served_model_name": "marked", "reasoning_parser": "openai_gptoss"}
    args = {**model, "load_format": "dummy", **args}
    return Build(name, shown, args, asynchronous=asynchronous, v2=v2, alone=True)


def _vocabulary(name: str, shown: str, size: int, parser: str, *, asynchronous: bool = False) -> Build:
    """Return a build with a real tokenizer, and the maze model grown to this size (`grown`)."""
    args = {
        "tokenizer": str(needed.vocabulary_folder() / name),
        "reasoning_parser": parser,
    }
    return Build(f"{name}-vocabulary", shown, args, asynchronous=asynchronous, vocabulary=name, size=size)


RANKS, BOUND = {"tensor_parallel_size": 2}, {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
NARROW = {"max_num_batched_tokens": 16}
UNCACHED = {"enable_prefix_caching": False}
# So few blocks that requests of little more than a hundred tokens preempt each other.
PRIORITY = {"scheduling_policy": "priority", "num_gpu_blocks_override": 32, "max_model_len": 512}
GRAMMAR = {"structured_outputs_config": {"enable_in_reasoning": True}}
# Every other layer attends to a window of 64 tokens; the model has no weights.
WINDOWS = {
    "model": str(ROOT / "tests" / "data" / "windows"),
    "tokenizer": str(MODEL),
    "load_format": "dummy",
    "num_gpu_blocks_override": 256,
}


def _connector(name: str, shown: str, connector: str, *, asynchronous: bool = False, v2: bool = False) -> Build:
    """Return an engine with one of vLLM's KV connectors, which records its calls, and with KV cache events."""
    config: dict[str, Any] = {"kv_connector": f"{RECORDED}{connector}", "kv_connector_module_path": PATH}
    config |= {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    args: dict[str, Any] = {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}}
    if connector.startswith("Nixl"):
        # After the end of a lease an engine without the guard of handovers reads other requests' KV, so the lease is
        # longer than any feature takes on a busy machine.
        config["kv_connector_extra_config"] = {"kv_lease_duration": 60}
    else:
        args["disable_hybrid_kv_cache_manager"] = True
        # By default each model of the machine finds the KV of the others.
        config["kv_connector_extra_config"] = {"shared_storage_path": f"{gettempdir()}/meridian-kv-{os.getpid()}"}
    if connector == "MultiConnector":
        example = {**config, "kv_connector": f"{RECORDED}ExampleConnector"}
        nixl = {**config, "kv_connector": f"{RECORDED}NixlConnector"}
        config["kv_connector_extra_config"] = {"connectors": [nixl, example]}
    args["kv_transfer_config"] = config
    env = {} if connector == "ExampleConnector" else NIXL
    return Build(name, shown, args, env, asynchronous=asynchronous, v2=v2)


# Settings for a single host, and for a CPU whose cores other programs use, too.
NIXL = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "UCX_NET_DEVICES": "lo", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
# A cache for some 320 tokens, and prompts in pieces.
TIGHT = {"num_gpu_blocks_override": 11, "max_model_len": 256, **NARROW}
BUILDS = {
    build.name: build
    for build in (
        Build("v1", "V1"),
        Build("async", "async", asynchronous=True),
        Build("v2", "V2", v2=True),
        Build("v2-async", "V2 async", v2=True, asynchronous=True),
        Build("ngram", "V1, drafts", {"speculative_config": NGRAM}),
        Build("v2-ngram", "V2, drafts", {"speculative_config": NGRAM}, v2=True),
        Build(
            "v2-async-ngram",
            "V2 async, drafts",
            {"speculative_config": NGRAM_THERE},
            v2=True,
            asynchronous=True,
        ),
        Build("tp2", "V1, two ranks", RANKS, BOUND),
        Build(
            "tp2-v2-async",
            "V2 async, two ranks",
            {**RANKS, "worker_extension_cls": "tests.engine.matrix.worker.Extension"},
            # For an embedding that is split among ranks, vLLM's compiled code asks Triton for its device.
            env={**BOUND, "TORCH_COMPILE_DISABLE": "1"},
            v2=True,
            asynchronous=True,
        ),
        Build("tight", "V1", TIGHT),
        Build("tight-async", "async", TIGHT, asynchronous=True),
        Build("tight-v2", "V2", TIGHT, v2=True),
        Build("tight-v2-async", "V2 async", TIGHT, v2=True, asynchronous=True),
        Build("chunked", "async", NARROW, asynchronous=True),
        Build("chunked-v2-async", "V2 async", NARROW, v2=True, asynchronous=True),
        Build("uncached", "async", UNCACHED, asynchronous=True),
        Build("uncached-v2-async", "V2 async", UNCACHED, v2=True, asynchronous=True),
        Build("lora", "async", LORA, asynchronous=True),
        Build("lora-v2", "V2", LORA, v2=True),
        _marked("marked", "V1"),
        _marked("marked-async", "async", asynchronous=True),
        _marked("marked-v2", "V2", v2=True),
        _marked("marked-v2-async", "V2 async", v2=True, asynchronous=True),
        _marked("marked-ngram", "V1, drafts", speculative_config=NGRAM),
        _marked("marked-v2-ngram", "V2, drafts", v2=True, speculative_config=NGRAM),
        _vocabulary("qwen3", "V1, Qwen3's vocabulary", 151_936, "qwen3"),
        _vocabulary("gptoss", "async, gpt-oss's vocabulary", 201_088, "openai_gptoss", asynchronous=True),
        Build("priority", "V1", PRIORITY, alone=True),
        Build("priority-async", "async", PRIORITY, asynchronous=True, alone=True),
        Build("windows-v1", "V1", WINDOWS),
        Build("windows", "async", WINDOWS, asynchronous=True),
        Build("windows-v2", "V2", WINDOWS, v2=True),
        Build("windows-v2-async", "V2 async", WINDOWS, v2=True, asynchronous=True),
        _connector("example", "V1", "ExampleConnector"),
        _connector("example-async", "async", "ExampleConnector", asynchronous=True),
        _connector("example-v2", "V2", "ExampleConnector", v2=True),
        _connector("example-v2-async", "V2 async", "ExampleConnector", v2=True, asynchronous=True),
        _connector("nixl", "V1", "NixlConnector"),
        _connector("nixl-async", "async", "NixlConnector", asynchronous=True),
        _connector("nixl-push", "V1", "NixlPushConnector"),
        _connector("nixl-and-example", "V1", "MultiConnector"),
        Build("grammar", "async", GRAMMAR, asynchronous=True),
        Build("grammar-v2-async", "V2 async", GRAMMAR, v2=True, asynchronous=True),
        Build("grammar-ngram", "V1, drafts", {**GRAMMAR, "speculative_config": NGRAM}),
    )
}


def prepare(build: Build) -> None:
    """Patch vLLM if this machine has no GPU; call it before the engine is made, in the engine's process.

    The CPU platform switches asynchronous scheduling off; the patch switches it on again, so that vLLM chooses
    AsyncScheduler as it does on GPUs. Model Runner V2's kernel that applies token masks does not run in Triton's
    interpreter, so torch does the same masking. vLLM 0.30 gets back its own kernel that accepts drafts on a CPU.
    """
    if "VLLM_NIXL_SIDE_CHANNEL_HOST" in build.env:
        # Each engine of a host listens for other engines on a port of its own.
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
    if ON_GPU:
        return
    import torch

    # On shared cores several threads of one engine wait for each other at every operation.
    torch.set_num_threads(1)
    if build.vocabulary:
        _keep_one_tokenizer()
    if build.asynchronous:
        _keep_async_scheduling()
    if build.v2:
        mask_in_torch()
    elif "speculative_config" in build.args:
        _accept_drafts()


def version_here() -> str:
    """Return the version of this Python's vLLM under which results are kept."""
    from meridian_agent.vllm_adapter.version import vllm_version

    return vllm_version().partition("+")[0] + ("+gpu" if ON_GPU else "")


def _keep_async_scheduling() -> None:
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def check(cls: Any, config: Any) -> None:
        original(cls, config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check)


def _keep_one_tokenizer() -> None:
    """Let no front end copy its tokenizer for other threads, which the engines of the matrix do not have: a copy of a
    real vocabulary takes seconds."""
    from vllm.renderers import hf

    hf.maybe_make_thread_pool = lambda tokenizer, _: tokenizer


def mask_in_torch() -> None:
    import numpy as np
    import torch
    from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker

    def apply(_: Any, logits: Any, batch: Any, request_ids: list[str], bitmask: Any) -> None:
        first = dict(zip(batch.req_ids, batch.cu_num_logits_np, strict=False))
        counts = dict(zip(batch.req_ids, np.diff(batch.cu_num_logits_np), strict=True))
        rows = [first[r] + i for r in request_ids for i in range(counts[r])]
        for row, words in zip(rows, bitmask, strict=True):
            allowed = np.unpackbits(words.view(np.uint8), bitorder="little")[: logits.shape[1]]
            logits[int(row), torch.from_numpy(allowed == 0)] = float("-inf")

    StructuredOutputsWorker.apply_grammar_bitmask = apply


def _accept_drafts() -> None:
    """Patch vLLM 0.30's CPU build, in which the kernel that accepts greedy drafts is no longer where its callers
    look."""
    from vllm.utils import cpu_triton_utils
    from vllm.v1.sample import rejection_sampler

    sample = getattr(rejection_sampler, "_rejection_greedy_sample", None)
    if sample and (kernel := getattr(cpu_triton_utils, "rejection_greedy_sample_kernel", None)):
        sample.kernel = kernel
