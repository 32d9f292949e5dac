"""The engines of the matrix: vLLM's runners and schedulers, and what else can be switched on.

Owns the arguments and the environment of each. Imports no vLLM: a build is known where none is installed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.engine import ENGINE_ARGS
from tests.processes import MARKED

LORA = {"enable_lora": True, "max_lora_rank": 8}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
# What vLLM's asynchronous scheduling takes: the drafts are made where the model runs, and only there they are known.
NGRAM_THERE = {**NGRAM, "method": "ngram_gpu"}
INTERPRETER = {
    "TRITON_INTERPRET": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "PYTHONPATH": os.pathsep.join(
        [str(Path(__file__).parent.parent / "interpreter"), *filter(None, [os.environ.get("PYTHONPATH")])]
    ),
}


@dataclass(frozen=True)
class Build:
    """One engine. `shown` is its column in the table: builds of the same column differ in what they switch on."""

    name: str
    shown: str
    args: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    asynchronous: bool = False
    v2: bool = False
    # What it says is scripted: there is no stock engine beside it.
    scripted: bool = False

    def engine_args(self) -> dict[str, Any]:
        return {**ENGINE_ARGS, "max_logprobs": -1, **self.args}


def _marked(
    name: str,
    shown: str,
    *,
    env: dict[str, str] | None = None,
    asynchronous: bool = False,
    v2: bool = False,
    **args: Any,
) -> Build:
    """A model without weights whose markers take several tokens."""
    model = {"model": str(MARKED), "served_model_name": "marked", "reasoning_parser": "openai_gptoss"}
    args = {**model, "load_format": "dummy", **args}
    return Build(name, shown, args, env or {}, asynchronous=asynchronous, v2=v2, scripted=True)


RANKS, BOUND = {"tensor_parallel_size": 2}, {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
NARROW = {"max_num_batched_tokens": 16}
UNCACHED = {"enable_prefix_caching": False}
PRIORITY = {"scheduling_policy": "priority"}
GRAMMAR = {"structured_outputs_config": {"enable_in_reasoning": True}}
# A cache for some 320 tokens, prompts in pieces.
TIGHT = {"num_gpu_blocks_override": 11, "max_model_len": 256, **NARROW}
BUILDS = {
    build.name: build
    for build in (
        Build("v1", "V1"),
        Build("async", "async", asynchronous=True),
        Build("v2", "V2", env=INTERPRETER, v2=True),
        Build("v2-async", "V2 async", env=INTERPRETER, v2=True, asynchronous=True),
        Build("ngram", "V1, drafts", {"speculative_config": NGRAM}),
        Build("v2-ngram", "V2, drafts", {"speculative_config": NGRAM}, env=INTERPRETER, v2=True),
        Build(
            "v2-async-ngram",
            "V2 async, drafts",
            {"speculative_config": NGRAM_THERE},
            env=INTERPRETER,
            v2=True,
            asynchronous=True,
        ),
        Build("tp2", "V1, two ranks", RANKS, BOUND),
        Build(
            "tp2-v2-async",
            "V2 async, two ranks",
            {**RANKS, "worker_extension_cls": "tests.engine.matrix.worker.Extension"},
            # What vLLM compiles for an embedding in parts asks Triton for its device.
            env={**INTERPRETER, **BOUND, "TORCH_COMPILE_DISABLE": "1"},
            v2=True,
            asynchronous=True,
        ),
        Build("tight", "V1", TIGHT),
        Build("tight-async", "async", TIGHT, asynchronous=True),
        Build("tight-v2", "V2", TIGHT, env=INTERPRETER, v2=True),
        Build("tight-v2-async", "V2 async", TIGHT, env=INTERPRETER, v2=True, asynchronous=True),
        Build("chunked", "async", NARROW, asynchronous=True),
        Build("chunked-v2-async", "V2 async", NARROW, env=INTERPRETER, v2=True, asynchronous=True),
        Build("uncached", "async", UNCACHED, asynchronous=True),
        Build("uncached-v2-async", "V2 async", UNCACHED, env=INTERPRETER, v2=True, asynchronous=True),
        Build("lora", "async", LORA, asynchronous=True),
        Build("lora-v2", "V2", LORA, env=INTERPRETER, v2=True),
        _marked("marked", "V1"),
        _marked("marked-async", "async", asynchronous=True),
        _marked("marked-v2", "V2", env=INTERPRETER, v2=True),
        _marked("marked-v2-async", "V2 async", env=INTERPRETER, v2=True, asynchronous=True),
        _marked("marked-ngram", "V1, drafts", speculative_config=NGRAM),
        _marked("marked-v2-ngram", "V2, drafts", env=INTERPRETER, v2=True, speculative_config=NGRAM),
        Build("priority", "V1", PRIORITY),
        Build("priority-async", "async", PRIORITY, asynchronous=True),
        Build("grammar", "async", GRAMMAR, asynchronous=True),
        Build("grammar-v2-async", "V2 async", GRAMMAR, env=INTERPRETER, v2=True, asynchronous=True),
        Build("grammar-ngram", "V1, drafts", {**GRAMMAR, "speculative_config": NGRAM}),
    )
}


def prepare(build: Build) -> None:
    """Patch vLLM where this machine has no GPU; call before the engine is made, in its process.

    The CPU platform switches asynchronous scheduling off: it is switched on again, so that vLLM chooses AsyncScheduler
    as it does on GPUs. Of Model Runner V2 the one kernel that does not run in Triton's interpreter, which applies token
    masks, is replaced by the same masking in torch. 0.30 gets its own kernel for accepting drafts on a CPU.
    """
    import torch

    # On shared cores several threads of one engine wait for each other at every operation.
    torch.set_num_threads(1)
    if build.asynchronous:
        _keep_async_scheduling()
    if build.v2:
        mask_in_torch()
    elif "speculative_config" in build.args:
        _accept_drafts()


def _keep_async_scheduling() -> None:
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def check(cls: Any, config: Any) -> None:
        original(cls, config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check)


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
    """The CPU build of 0.30 puts the kernel that accepts greedy drafts where nothing looks for it any more."""
    from vllm.utils import cpu_triton_utils
    from vllm.v1.sample import rejection_sampler

    sample = getattr(rejection_sampler, "_rejection_greedy_sample", None)
    if sample and (kernel := getattr(cpu_triton_utils, "rejection_greedy_sample_kernel", None)):
        sample.kernel = kernel
