"""What the agent costs per engine step, beside what the scheduler itself takes: `python -m tests.bench.step_cost`.

Protocol: one engine, everything on, a neutral policy with EAT probes off and token entropy on; batches of 1, 16 and 64
requests that think without end, greedy, 300 tokens each, five repetitions after one warm-up, in one run. Both times are
taken around the calls in the engine-core thread of the same steps: the agent's hooks, and stock `schedule` plus
`update_from_output`. Reported are medians over repetitions of the mean per step. The round trip is from queueing a step
report to the answer to it, taken by the link. The last line is JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.engine import ENGINE_ARGS, prompt_ids
from tests.processes import ENGINE_ENV, Control

BATCHES = (1, 16, 64)
REPETITIONS = 5
TOKENS = 300
POLICY: dict[str, Any] = {"scheduler": {"max_think_tokens": 100_000}}


def median_of(llm: Any, agent: Any, requests: int) -> dict[str, float]:
    from vllm import SamplingParams

    from tests.data import maze

    end = agent.tracker.markers.end[0]
    cases = [{"prompt": p, "template": {"open_think": True}} for p in maze.prompts(requests, seed=1)]
    prompts = [{"prompt_token_ids": prompt_ids(llm, case)} for case in cases]
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    agent_us, stock_us, round_trip_ms = [], [], []
    for repetition in range(REPETITIONS + 1):
        params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logit_bias={end: -30.0})
        before = scheduler.current_step, agent.agent_seconds, agent.scheduler_seconds
        llm.generate(prompts, params, use_tqdm=False)
        if repetition:
            steps = scheduler.current_step - before[0]
            agent_us.append((agent.agent_seconds - before[1]) / steps * 1e6)
            stock_us.append((agent.scheduler_seconds - before[2]) / steps * 1e6)
            round_trip_ms.append(agent.link.round_trip_ms)
    a, s = statistics.median(agent_us), statistics.median(stock_us)
    return {
        "requests": requests,
        "agent_us": round(a, 1),
        "stock_us": round(s, 1),
        "ratio": round(a / s, 3),
        "round_trip_ms": round(statistics.median(round_trip_ms), 2),
    }


def main() -> int:
    folder = Path(tempfile.mkdtemp())
    control = Control(folder)
    os.environ.update(ENGINE_ENV)
    os.environ.update(MERIDIAN_CONTROL=control.target, VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="WARNING")
    import torch
    import vllm

    torch.set_num_threads(1)
    try:
        args = {**ENGINE_ARGS, "max_num_seqs": 64, "num_gpu_blocks_override": 2048}
        llm = vllm.LLM(**args)
        agent = llm.llm_engine.engine_core.engine_core.scheduler._agent
        control.apply(POLICY)
        rows = [median_of(llm, agent, n) for n in BATCHES]
        llm.llm_engine.engine_core.shutdown()
    finally:
        control.process.stop()
    print("| running requests | agent, us per step | stock schedule + update, us per step | ratio | round trip, ms |")
    print("|---|---|---|---|---|")
    for r in rows:
        print(f"| {r['requests']} | {r['agent_us']} | {r['stock_us']} | {r['ratio']} | {r['round_trip_ms']} |")
    print(json.dumps({"vllm": vllm.__version__, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
