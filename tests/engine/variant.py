"""Runs the shared cases on an engine built another way and prints what came out as JSON.

`python -m tests.engine.variant async|ngram|v2 CONTROL_TARGET`.

async: the CPU platform switches asynchronous scheduling off; here it is switched on again, so that vLLM chooses
AsyncScheduler as it does on GPUs. v2: Model Runner V2 in Triton's interpreter (see `interpreter/`); the one kernel that
does not run there, which applies token masks, is replaced by the same masking in torch.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from tests.engine import ENGINE_ARGS, cases, chat, prompt_ids
from tests.engine.offline import load, mismatches, probe_mismatches
from tests.engine.policies import CONVERGED, DENSE
from tests.engine.recording import probes, records, rows
from tests.processes import ENGINE_ENV, Control, wait_for

CAPS = (1, 2, 20)
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


def keep_async_scheduling() -> None:
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


def main() -> None:
    variant, control = sys.argv[1], Control.existing(sys.argv[2])
    os.environ.update(ENGINE_ENV)
    os.environ.update(MERIDIAN_CONTROL=control.target, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    import torch
    import vllm

    torch.set_num_threads(1)
    extra: dict[str, Any] = {"speculative_config": NGRAM} if variant == "ngram" else {}
    if variant == "async":
        keep_async_scheduling()
    if variant == "v2":
        mask_in_torch()
    tokens = 120 if variant == "v2" else 400
    llm = vllm.LLM(**ENGINE_ARGS, **extra)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    chosen = [{**case, "template": {"open_think": True}} for case in cases()]

    def run(policy: dict[str, Any], tokens: int) -> list[list[int]]:
        control.apply(policy)
        return chat(llm, chosen, vllm.SamplingParams(temperature=0.0, max_tokens=tokens))

    found: dict[str, Any] = {"scheduler": [c.__name__ for c in type(scheduler).__mro__]}
    found["v2"] = scheduler.use_v2_model_runner
    found["end"] = scheduler._agent.tracker.markers.end[0]
    with records(scheduler._agent) as seen:
        found["free"] = run(DENSE, tokens)
    logprobs, prompts = load(), [prompt_ids(llm, case) for case in chosen]
    found["mismatches"] = [
        line
        for prompt, generated, measured in zip(prompts, found["free"], rows(seen).values(), strict=True)
        for line in mismatches(logprobs, prompt, generated, measured, found["end"])
    ]
    probed = probes(seen)
    found["probe_mismatches"] = [
        line
        for prompt, generated, name in zip(prompts, found["free"], rows(seen), strict=True)
        for line in probe_mismatches(logprobs, prompt, generated, probed.get(name, []), [found["end"]])
    ]
    found["probe_costs"] = [cost for of in probed.values() for *_, cost, _, _ in of]
    found["capped"] = {cap: run({"scheduler": {"max_think_tokens": cap}}, 60) for cap in CAPS}
    found["converged"] = run(CONVERGED, tokens)
    if variant != "v2":
        control.freeze()
        wait_for(lambda: control.engine().freeze.confirmed, 10, "the freeze")
        found["frozen"] = chat(llm, chosen, vllm.SamplingParams(temperature=0.0, max_tokens=tokens))
        control.thaw()
        wait_for(lambda: not control.engine().HasField("freeze"), 10, "the thaw")
    engine = control.settled()
    found["ends"], found["fault"] = dict(engine.ends), scheduler._guard.fault
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
