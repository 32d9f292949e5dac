"""Measure what a very long request costs the agent in a step: `python -m tests.bench.long_requests`.

The protocol is in tests/bench/README.md. The module owns vLLM's own scheduler without a model, with the agent in front
of it under a real control plane, and the lengths of the requests. The last line printed is JSON.
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
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.bench import program
from tests.bench.machine import machine, rss_mb
from tests.processes import ROOT, STATE, Control, wait_for

if TYPE_CHECKING:
    from collections.abc import Sequence

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


@dataclass(frozen=True)
class Found:
    """Figures of one arm. Times in us are medians per step, in the request's first steps of output and in its last.

    stock_*: stock's schedule and update. agent_*: the agent's hooks. opened_ms: adding the request, with all hooks.
    longest_ms: the longest step, in processor time of the engine's thread. rss_mb: growth of the process. held_kb: the
    agent's own objects after the first steps and before the last. think_tokens: thinking tokens when the thinking was
    ended, or None.
    """

    case: str
    arm: str
    opened_ms: float
    stock_first_us: float
    stock_last_us: float
    agent_first_us: float
    agent_last_us: float
    longest_ms: float
    probes: dict[str, int]
    rss_mb: float
    held_kb: tuple[float, float]
    think_tokens: int | None


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


def measure(case: Case, arm: str, control: Control) -> Found:
    engine = Engine(arm == "governed", case.prompt_tokens + case.new_tokens)
    if engine.agent is not None:
        control.engine()
        control.apply(PROBED if case.probed else QUIET)
    # vLLM's engine core does the same: a collection of all imported objects takes a third of a second.
    gc.freeze()
    before_mb = rss_mb(os.getpid())
    opened_ms = engine.add("long", case)
    stock_us, agent_us, longest_s = list[float](), list[float](), 0.0
    generated, held_kb = 0, list[float]()
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
    grown_mb = rss_mb(os.getpid()) - before_mb
    probes = dict(_refusals(engine, control)) if case.probed and engine.agent is not None else {}
    if engine.agent is not None:
        assert not engine.scheduler._guard.fault, engine.scheduler._guard.fault
        engine.agent.link.stop()

    def first(of: Sequence[float]) -> float:
        return statistics.median(of[: case.looked_at])

    def last(of: Sequence[float]) -> float:
        return statistics.median(of[-case.looked_at :])

    return Found(
        case=case.name,
        arm=arm,
        opened_ms=opened_ms,
        stock_first_us=first(stock_us),
        stock_last_us=last(stock_us),
        agent_first_us=first(agent_us),
        agent_last_us=last(agent_us),
        longest_ms=longest_s * 1e3,
        probes=probes,
        rss_mb=grown_mb,
        held_kb=(held_kb[0], held_kb[-1]),
        think_tokens=engine.think_tokens,
    )


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


def _refusals(engine: Engine, control: Control) -> dict[str, int]:
    found = control.engine()
    return {"asked": found.decisions["probe"], "tokens": found.counters.probe_tokens}


def table(found: Sequence[Found]) -> list[str]:
    head = (
        "request",
        "adding it, stock / governed, ms",
        "stock's step, first / last, us",
        "the agent's part, first / last, us",
        "longest step, stock / governed, ms",
        "grown by, stock / governed, MB",
        "the agent's objects, first / last, KB",
    )
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for stock, own in zip(found[::2], found[1::2], strict=True):
        cells = (
            own.case,
            f"{stock.opened_ms:.2f} / {own.opened_ms:.2f}",
            f"{stock.stock_first_us:.0f} / {stock.stock_last_us:.0f}",
            f"{own.agent_first_us:.0f} / {own.agent_last_us:.0f}",
            f"{stock.longest_ms:.1f} / {own.longest_ms:.1f}",
            f"{stock.rss_mb:.0f} / {own.rss_mb:.0f}",
            f"{own.held_kb[0]:.0f} / {own.held_kb[1]:.0f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests.bench.long_requests", description=__doc__)
    parser.add_argument("--decoded", type=int, default=MILLION, help="tokens of the longest output")
    parser.add_argument("--only", type=int, nargs="*", help="run only these cases, by number")
    parser.add_argument(
        "--engine",
        type=int,
        default=0,
        help="also run a prompt of this many tokens on a real engine, which takes minutes",
    )
    parser.add_argument("--arm", choices=("stock", "governed"), help=argparse.SUPPRESS)
    parser.add_argument("--control", help=argparse.SUPPRESS)
    return parser.parse_args()


def in_a_process(number: int, arm: str, decoded: int, control: Control) -> Found:
    """Measure one arm in a process of its own, so that no arm finds another one's memory. Raises BenchError."""
    target = {"MERIDIAN_CONTROL": control.target, "MERIDIAN_ENGINE_ID": "long", "MERIDIAN_STATE_DIR": STATE}
    command = [sys.executable, "-m", "tests.bench.long_requests", "--only", str(number), "--arm", arm]
    command += ["--decoded", str(decoded), "--control", control.target]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **target}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise program.BenchError(done.stderr[-2000:])
    return Found(**json.loads(done.stdout.splitlines()[-1]))


def on_an_engine(tokens: int, control: Control) -> list[dict[str, float]]:
    """Measure a long prompt on a real engine, in a process of its own. Raises BenchError."""
    target = {"MERIDIAN_CONTROL": control.target, "MERIDIAN_ENGINE_ID": "engine", "MERIDIAN_STATE_DIR": STATE}
    command = [sys.executable, "-m", "tests.bench.long_engine", control.target, str(tokens)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **target}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise program.BenchError(done.stderr[-2000:])
    found: list[dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def run() -> None:
    """Run the whole benchmark. Raises BenchError."""
    options = arguments()
    every = cases(options.decoded)
    numbers = range(len(every)) if options.only is None else options.only
    if options.arm:
        (number,) = numbers
        print(json.dumps(asdict(measure(every[number], options.arm, Control.existing(options.control)))))
        return
    folder = Path(tempfile.mkdtemp(prefix="meridian-long-"))
    control = Control(folder)
    try:
        found = [in_a_process(n, arm, options.decoded, control) for n in numbers for arm in ("stock", "governed")]
        engine = on_an_engine(options.engine, control) if options.engine else []
    finally:
        control.process.stop()
    print("\n".join(table(found)))
    for one in engine:
        print(json.dumps(one))
    print(json.dumps({"found": [asdict(one) for one in found], "engine": engine, "machine": machine()}))


if __name__ == "__main__":
    program.main(run)
