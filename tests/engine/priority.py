"""Runs more requests than the cache holds on an engine with vLLM's priority policy and prints what was preempted.

`python -m tests.engine.priority CONTROL_TARGET`. Twice the same load, in vLLM's own order and with answers first; the
thinking requests of the last one in each have a more urgent priority of their own.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from tests.engine import ENGINE_ARGS, Run, cases
from tests.processes import ENGINE_ENV, Control

THINK, ANSWER = {"open_think": True}, {"enable_thinking": False}


def main() -> None:
    control = Control.existing(sys.argv[1])
    os.environ.update(ENGINE_ENV)
    os.environ.update(MERIDIAN_CONTROL=control.target, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    import torch
    import vllm

    torch.set_num_threads(1)
    llm = vllm.LLM(**ENGINE_ARGS, scheduling_policy="priority")
    agent = llm.llm_engine.engine_core.engine_core.scheduler._agent
    bias = {agent.tracker.markers.end[0]: -30.0}

    def params(max_tokens: int) -> Any:
        return vllm.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logit_bias=bias)

    def load(strategy: str, think_priority: int) -> dict[str, Any]:
        control.apply({"scheduler": {"strategy": strategy}, "entropy": {"shadow": True}})
        before = agent.preempted_think, agent.output_critical
        run = Run(llm)
        for i in range(5):
            run.add(f"think-{i}", {**cases()[i], "template": THINK}, params(380), priority=think_priority)
        for i in range(3):
            run.add(f"answer-{i}", {**cases()[i], "template": ANSWER}, params(250), priority=0)
        run.until(pause_s=0.001)
        control.settled()
        counts = agent.preempted_think - before[0], agent.output_critical - before[1]
        return {"think": counts[0], "answer": counts[1], "tokens": run.tokens}

    found = {
        "stock": load("stock", 0),
        "output_first": load("output_first", 0),
        "thinking_goes_first": load("output_first", -1),
        "policy": llm.llm_engine.vllm_config.scheduler_config.policy,
        "fault": llm.llm_engine.engine_core.engine_core.scheduler._guard.fault,
    }
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
