"""Runs the shared cases on an engine built another way and prints what came out as JSON.

`python -m tests.engine.variant async|ngram CONTROL_TARGET`. The CPU platform switches asynchronous scheduling off; here
it is switched on again, so that vLLM chooses AsyncScheduler as it does on GPUs.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from tests.engine import ENGINE_ARGS, cases, chat
from tests.engine.policies import CONVERGED, NEUTRAL
from tests.processes import ENGINE_ENV, Control

CAPS = (1, 2, 20)
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


def keep_async_scheduling() -> None:
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def check(cls: Any, config: Any) -> None:
        original(cls, config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check)


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
    llm = vllm.LLM(**ENGINE_ARGS, **extra)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    chosen = [{**case, "template": {"open_think": True}} for case in cases()]

    def run(policy: dict[str, Any], tokens: int) -> list[list[int]]:
        control.apply(policy)
        return chat(llm, chosen, vllm.SamplingParams(temperature=0.0, max_tokens=tokens))

    found: dict[str, Any] = {"scheduler": [c.__name__ for c in type(scheduler).__mro__]}
    found["end"] = scheduler._agent.tracker.markers.end[0]
    found["free"] = run(NEUTRAL, 400)
    found["capped"] = {cap: run({"scheduler": {"max_think_tokens": cap}}, 60) for cap in CAPS}
    found["converged"] = run(CONVERGED, 400)
    engine = control.settled()
    found["ends"], found["fault"] = dict(engine.ends), scheduler._guard.fault
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
