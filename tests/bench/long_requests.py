"""Measure what a very long request costs the agent in a step: `python -m tests.bench.long_requests`.

The protocol is in tests/bench/cost.md. The module owns vLLM's own scheduler without a model, with the agent in front of
it under a real control plane, and the lengths of the requests.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import logging
import os
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.bench import harness
from tests.bench.harness import BenchError, Column
from tests.bench.machine import machine, rss_mb
from tests.processes import ROOT, STATE, Control, wait_for

if TYPE_CHECKING:
    from tests.bench.harness import Figures, Session

BLOCK, BATCH_TOKENS, PLACES = 32, 8192, 8
MILLION = 1_000_000
# Steps whose times are compared, at the beginning and at the end of a request's output: at most LOOKED_AT of each, and
# at most one in LOOKED_AT_SHARE of all steps.
LOOKED_AT, LOOKED_AT_SHARE = 10_000, 6
# The agent's objects refer to these types, which are code, threads or loggers and do not count as the agent's memory.
NOT_HELD = (ModuleType, FunctionType, BuiltinFunctionType, type, threading.Thread, logging.Logger)
# QUIET requests no probes; PROBED requests one wherever it is possible, at every token.
QUIET: dict[str, Any] = {"scheduler": {"max_think_tokens": 100_000_000}}
PROBED: dict[str, Any] = {
    "scheduler": {"max_think_tokens": 100_000_000, "min_think_tokens": 0},
    "entropy": {"shadow": True, "eat_probe_interval_tokens": 1, "eat_probe_placement": "anywhere"},
}


@dataclass(frozen=True)
class Case:
    """One request.

    opens: whether its prompt ends in the marker that opens thinking; otherwise the prompt has no marker. cap: thinking
    tokens after which the request is to answer; 0 for no cap.
    """

    name: str
    prompt_tokens: int
    new_tokens: int
    opens: bool = True
    probed: bool = False
    cap: int = 0

    @property
    def looked_at(self) -> int:
        return min(LOOKED_AT, self.new_tokens // LOOKED_AT_SHARE)


COLUMNS = (
    Column("opened_ms", "adding the request, ms", 2),
    Column("stock_first_us", "stock's step, first, us", 0),
    Column("stock_last_us", "last", 0),
    Column("agent_first_us", "the agent's part, first, us", 0),
    Column("agent_last_us", "last", 0),
    Column("longest_ms", "longest step, ms", 1),
    Column("rss_mb", "grown by, MB", 0),
    Column("held_first_kb", "the agent's objects, first, KB", 0),
    Column("held_last_kb", "last", 0),
)


def cases(decoded: int) -> list[Case]:
    return [
        Case("1,000 tokens of prompt", 1000, 3000),
        Case("1,000,000 tokens of prompt", MILLION, 3000),
        Case("the same without any marker", MILLION, 3000, opens=False),
        Case(f"{decoded:,} tokens generated, half of them thinking", 1000, decoded, cap=decoded // 2),
        Case("1,000 tokens of prompt, probed", 1000, 3000, probed=True),
        Case("1,000,000 tokens of prompt, probed", MILLION, 3000, probed=True),
    ]


class Engine:
    """vLLM's scheduler, driven step by step; the imitated model always generates the same word."""

    def __init__(self, is_governed: bool, tokens: int) -> None:
        import torch
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

        from meridian_agent.engine.scheduler_mixin import governed
        from tests.sim.engine import Shape, config_of, words

        blocks = tokens // BLOCK + 4096
        config, structured = config_of(Shape(places=PLACES, blocks=blocks, batch_tokens=BATCH_TOKENS))
        config = copy.copy(config)
        config.model_config = copy.copy(config.model_config)
        config.model_config.max_model_len = 2 * tokens + 4096
        config.cache_config.block_size = BLOCK
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        cache = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)])
        kind = governed(Scheduler) if is_governed else Scheduler
        self.scheduler: Any = kind(config, cache, structured, block_size=BLOCK, log_stats=False)
        self.start, self.end, _, text = words()
        self.think_tokens: int | None = None
        self.word = text[0]
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self._left: dict[str, int] = {}

    @property
    def agent(self) -> Any:
        return getattr(self.scheduler, "_agent", None)

    def add(self, name: str, case: Case) -> float:
        """Add a request and return the scheduler's milliseconds for it, without the making of the request and its
        hashes."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        prompt = [self.word] * (case.prompt_tokens - 1) + [self.start if case.opens else self.word]
        own = {"meridian_max_think_tokens": case.cap} if case.cap else None
        params = SamplingParams(max_tokens=case.new_tokens, ignore_eos=True, extra_args=own)
        request = Request(name, prompt, params, None, arrival_time=0.0, block_hasher=self._hasher)
        self._left[name] = case.prompt_tokens
        began_s = time.perf_counter()
        self.scheduler.add_request(request)
        return (time.perf_counter() - began_s) * 1e3

    def step(self) -> int:
        """Run one step and return the number of tokens generated in it, probes left out."""
        from vllm.v1.outputs import ModelRunnerOutput

        from meridian_agent.core.step_signals import REQUEST, RESULT, StepSignals
        from tests.sim.engine import forced

        output = self.scheduler.schedule()
        masks = forced(output, self.scheduler.get_grammar_bitmask(output))
        ids = list(output.num_scheduled_tokens)
        sampled = [[self._token(masks.get(r))] if self._reaches(r, output.num_scheduled_tokens[r]) else [] for r in ids]
        result = ModelRunnerOutput(ids, {r: i for i, r in enumerate(ids)}, sampled)
        if hasattr(output, REQUEST) and ids:
            ones = np.ones(len(ids), np.float32)
            setattr(result, RESULT, StepSignals(None, ones, ones.astype(np.int32), -ones, -ones).encode())
        self.scheduler.update_from_output(output, result)
        return sum(len(s) for r, s in zip(ids, sampled, strict=True) if r in self._left)

    def _token(self, mask: dict[int, int] | None) -> int:
        """Return the token that the mask allows, or the usual word without a mask."""
        if mask is None:
            return self.word
        (token,) = mask.values()
        if token == self.end:
            self.think_tokens = self.scheduler.requests["long"].num_output_tokens
        return token

    def _reaches(self, request_id: str, scheduled: int) -> bool:
        """Return whether `scheduled` more tokens bring a request past its prompt."""
        if request_id not in self._left:
            request = self.scheduler.requests[request_id]
            return bool(request.num_computed_tokens >= request.num_tokens)
        self._left[request_id] = left = max(0, self._left[request_id] - scheduled)
        return left == 0


def request(case: Case, arm: str, control: Control) -> Figures:
    """Return the figures of one request.

    Times in us are medians per step, in the request's first steps of output and in its last: stock's schedule and
    update, and the agent's hooks. opened_ms: adding the request, with all hooks. longest_ms: the longest step, in
    processor time of the engine's thread. rss_mb: growth of the process. held_kb: the agent's own objects after the
    first steps and before the last. think_tokens: thinking tokens when the thinking was ended.
    """
    engine = Engine(arm == "governed", case.prompt_tokens + case.new_tokens)
    if engine.agent is not None:
        control.engine()
        control.apply(PROBED if case.probed else QUIET)
    # vLLM's engine core does the same: a collection of all imported objects takes a third of a second.
    gc.freeze()
    before_mb = rss_mb(os.getpid())
    found = {"opened_ms": engine.add("long", case)}
    stock_us, agent_us, held_kb, longest_s, generated = list[float](), list[float](), list[float](), 0.0, 0
    while generated < case.new_tokens:
        if generated in {case.looked_at, case.new_tokens - 1}:
            held_kb.append(_held_kb(engine))
        agent_s, began_s, began_cpu_s = _seconds(engine), time.perf_counter(), time.thread_time()
        new = engine.step()
        took_s, own_s = time.perf_counter() - began_s, _seconds(engine) - agent_s
        longest_s = max(longest_s, time.thread_time() - began_cpu_s)
        generated += new
        if new:
            agent_us.append(own_s * 1e6)
            stock_us.append((took_s - own_s) * 1e6)
        if case.probed:
            # The step lasts as long as a large model's, so that a probe can be requested in each.
            time.sleep(0.002)
    for name, times_us in (("stock", stock_us), ("agent", agent_us)):
        found[f"{name}_first_us"] = statistics.median(times_us[: case.looked_at])
        found[f"{name}_last_us"] = statistics.median(times_us[-case.looked_at :])
    found |= {"longest_ms": longest_s * 1e3, "rss_mb": rss_mb(os.getpid()) - before_mb}
    found |= {"held_first_kb": held_kb[0], "held_last_kb": held_kb[-1]}
    if engine.agent is not None:
        seen = control.engine()
        found |= {"probes": seen.decisions.get("probe", 0), "probe_tokens": seen.counters.probe_tokens}
        assert not engine.scheduler._guard.fault, engine.scheduler._guard.fault
        engine.agent.link.stop()
    return found if engine.think_tokens is None else found | {"think_tokens": engine.think_tokens}


def _seconds(engine: Engine) -> float:
    return engine.agent.agent_seconds if engine.agent is not None else 0.0


def _held_kb(engine: Engine) -> float:
    """Return the size of the agent's objects and everything they refer to, vLLM's objects left out.

    The size is taken after the link has sent its queue.
    """
    if engine.agent is None:
        return 0.0
    wait_for(lambda: not engine.agent.link.outbox.ring.qsize(), 10, "the link to send its queue")
    seen, size, waiting = {id(engine.scheduler)}, 0, [engine.agent]
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, NOT_HELD) or type(one).__module__.startswith(("vllm", "torch", "grpc")):
            continue
        seen.add(id(one))
        size += sys.getsizeof(one)
        waiting += gc.get_referents(one)
    return size / 1024


def in_a_process(number: int, arm: str, session: Session, control: Control) -> Figures:
    """Measure one arm in a process of its own, so that no arm finds another one's memory. Raises BenchError."""
    target = {"MERIDIAN_CONTROL": control.target, "MERIDIAN_ENGINE_ID": "long", "MERIDIAN_STATE_DIR": STATE}
    command = [sys.executable, "-m", "tests.bench.long_requests", "--only", str(number), "--arm", arm]
    command += ["--decoded", str(session.options.decoded), "--control", control.target]
    command += ["--output", str(session.folder / arm)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **target}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchError(done.stderr[-2000:])
    found: Figures = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(session: Session) -> dict[str, Any]:
    given = session.options
    every = cases(given.decoded)
    if given.arm:
        return request(every[given.only[0]], given.arm, Control.existing(given.control))
    control = Control(session.fresh())
    try:
        for number in range(len(every)) if given.only is None else given.only:
            for arm in ("stock", "governed"):
                session.add(arm, in_a_process(number, arm, session, control), case=every[number].name)
    finally:
        control.process.stop()
    session.table("A long request", "vLLM's scheduler without a model.", COLUMNS, "stock")
    found = [{"case": run.case, "arm": run.arm, **run.figures} for run in session.runs.all]
    return {"found": found, "machine": machine()}


def options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--decoded", type=int, default=MILLION, help="tokens of the longest output")
    add("--only", type=int, nargs="*", help="run only these cases, by number")
    add("--arm", choices=("stock", "governed"), help=argparse.SUPPRESS)
    add("--control", help=argparse.SUPPRESS)


if __name__ == "__main__":
    harness.main("long_requests", "Long requests", __doc__, options, measure)
