"""Run one long request on a real engine, for `long_requests`: `python -m tests.bench.long_engine CONTROL TOKENS`.

The module owns an engine of the maze's model, configured for that many tokens, whose core runs in this process. The
last line printed is JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from typing import Any

from tests.bench import program
from tests.bench.machine import rss_mb
from tests.engine import ENGINE_ARGS, prompt_ids
from tests.processes import ENGINE_ENV, Control

NEW_TOKENS = 300


def start(tokens: int) -> Any:
    os.environ.update(ENGINE_ENV)
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_ALLOW_LONG_MAX_MODEL_LEN="1")
    import torch
    import vllm

    torch.set_num_threads(1)
    room = tokens + 2 * NEW_TOKENS
    longer = {
        "max_model_len": room,
        "hf_overrides": {"max_position_embeddings": room},
        "num_gpu_blocks_override": room // ENGINE_ARGS["block_size"] + 64,
        "max_num_batched_tokens": 8192,
    }
    return vllm.LLM(**{**ENGINE_ARGS, **longer})


def one(llm: Any, tokens: int) -> dict[str, float]:
    """Run a request that thinks after a prompt of `tokens` tokens; return the agent's median microseconds per step."""
    from vllm import SamplingParams

    agent = llm.llm_engine.engine_core.engine_core.scheduler._agent
    end, words = agent.tracker.markers.end[0], prompt_ids(llm, {"prompt": "a b c", "template": {"open_think": True}})
    prompt = [words[3]] * (tokens - len(words)) + words
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logit_bias={end: -30.0})
    began_s, before_s, before_mb = time.monotonic(), agent.agent_seconds, rss_mb(os.getpid())
    llm.llm_engine.add_request(f"{tokens}", {"prompt_token_ids": prompt}, params)
    opened_s, steps, first_s, said = agent.agent_seconds - before_s, list[float](), 0.0, 0
    while llm.llm_engine.has_unfinished_requests():
        own_s = agent.agent_seconds
        outputs = llm.llm_engine.step()
        if outputs:
            first_s = first_s or time.monotonic() - began_s
            steps.append((agent.agent_seconds - own_s) * 1e6)
            said = len(outputs[0].outputs[0].token_ids)
    assert said == NEW_TOKENS, said
    return {
        "prompt_tokens": tokens,
        "opened_ms": opened_s * 1e3,
        "first_token_s": first_s,
        "agent_us": statistics.median(steps),
        "longest_ms": max(steps) / 1e3,
        "rss_mb": rss_mb(os.getpid()) - before_mb,
    }


def run() -> None:
    control, tokens = Control.existing(sys.argv[1]), int(sys.argv[2])
    llm = start(tokens)
    control.engine()
    control.apply({"scheduler": {"max_think_tokens": 100_000_000}, "entropy": {"shadow": True}})
    found = [one(llm, size) for size in (1000, 1000, tokens, 1000)]
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    assert not scheduler._guard.fault, scheduler._guard.fault
    llm.llm_engine.engine_core.shutdown()
    # The first request only warms up the engine.
    print("\n" + json.dumps(found[1:]))


if __name__ == "__main__":
    program.main(run)
