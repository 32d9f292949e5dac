"""Measure how much the decision log and traces cost a session: `python -m tests.bench.decision_log`.

The protocol is in tests/bench/cost.md.
"""

from __future__ import annotations

import gc
import multiprocessing
import time
from typing import TYPE_CHECKING, Any

from meridian.v1 import agent_pb2

from meridian_agent.link.messages import mergeable, step_report
from meridian_control.app.garbage import FLOOD, NEVER, NEWEST
from meridian_control.capabilities.listed import STREAM_PARTS
from meridian_control.engine.session import Session
from meridian_control.journal.journal import Journal
from meridian_control.journal.log import DecisionLog
from meridian_control.telemetry.request_traces import Tracing
from tests.bench import harness
from tests.bench.harness import Column
from tests.contract.control.telemetry.test_tracing import Collector
from tests.fakes.agent import FakeAgent
from tests.fakes.tables import policy
from tests.unit.sessions import NOW, Stream

if TYPE_CHECKING:
    import argparse
    from multiprocessing.connection import Connection

    from meridian_agent.core.step_record import StepRecord
    from tests.bench.harness import Figures

# Requests at once, steps of the stream, and most steps in a report.
AT_ONCE, STEPS, MERGED = 64, 1000, 8
WITHOUT, LOG, SOME, ALL = "without", "log", "traces of 1 %", "traces of all"
RATIOS = {SOME: 0.01, ALL: 1.0}
POLICY = policy(entropy={"shadow": True, "rank_conditions": [{"max_ranks": [5, 5]}]})


class MergingAgent(FakeAgent):
    """A fake agent that merges up to MERGED steps into a report."""

    def __init__(self) -> None:
        super().__init__()
        self._records: list[StepRecord] = []

    def _report(self) -> StepRecord:
        record = self.engine.tracker.record
        record.step_time_ms = self.step_cost_ms[0]
        record = self.engine.take()
        record.ended_s = record.step * record.step_time_ms / 1e3
        if self._records and not mergeable(self._records, record):
            self._send()
        self._records.append(record)
        if len(self._records) == MERGED:
            self._send()
        return record

    def _send(self) -> None:
        self.say(step=step_report(self._records, sparse=True))
        self._records = []


def recorded() -> Stream:
    made = Stream(agent=MergingAgent(), hello_fields={"num_blocks": 1 << 16})
    made.apply(POLICY)
    rng, number = made.agent.rng, 0
    for _ in range(STEPS):
        while len(made.agent.engine.live) < AT_ONCE:
            made.open(f"r{number}", think=rng.randrange(50, 800), answer=rng.randrange(1, 100))
            number += 1
        made.agent.end_rank, made.agent.eat_nats = rng.randrange(1, 100), rng.random()
        made.step()
    return made


def seconds(made: Stream, arm: str, tracing: Tracing | None) -> float:
    """Return the process time of the whole stream under one arm."""
    log = DecisionLog(ended=tracing.queue_spans) if tracing is not None else DecisionLog()
    session = Session(
        "s", made.hello, NOW, Journal(log, "engine", "1", "s", NOW) if arm != WITHOUT else None, parts=STREAM_PARTS
    )
    begun = time.process_time()
    for now, message in made.trace:
        if isinstance(message, agent_pb2.ConnectRequest):
            session.on_message(message, now)
        else:
            session.on_policy(*message)
    if tracing is not None:
        tracing._provider.force_flush()
    gc.collect(NEWEST)
    return time.process_time() - begun


def collect(pipe: Connection) -> None:
    """Serve as a collector until the pipe says stop; send the port first, and at the end the number of spans
    received."""
    collector = Collector()
    pipe.send(collector.port)
    pipe.recv()
    collector.server.stop(None).wait()
    pipe.send(len(collector.spans))


async def measure(session: harness.Session) -> dict[str, Any]:
    gc.set_threshold(FLOOD, gc.get_threshold()[1], NEVER)
    pipe, other = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=collect, args=(other,))
    process.start()
    endpoint = f"127.0.0.1:{pipe.recv()}"
    tracings = {arm: Tracing(endpoint, ratio) for arm, ratio in RATIOS.items()}
    arms, runs, made = [WITHOUT, LOG, *tracings], session.runs, recorded()
    gc.collect()
    gc.freeze()
    totals = made.session.totals

    def run(arm: str, _: int) -> Figures:
        took_s = seconds(made, arm, tracings.get(arm))
        return {"seconds": took_s, "per_second": totals.token_events / took_s}

    for arm in arms:
        run(arm, 0)
    await session.rounds(arms, run, session.options.turns)
    last: dict[str, Any] = {"decisions": totals.decisions.total() - totals.decisions["plan"], "reports": totals.reports}
    for arm in arms:
        last[arm] = {
            "per_second": runs.median(arm, "per_second").rounded(0),
            "of_without": runs.ratio(arm, WITHOUT, "seconds").rounded(3),
            "of_log": runs.ratio(arm, LOG, "seconds").rounded(3),
        }
    columns = (Column("seconds", "processor time, s", 3, "ratio"), Column("per_second", "token events per second", 0))
    text = f"A stream of {AT_ONCE} requests at once, with reports of up to {MERGED} steps."
    session.table("A session", text, columns, WITHOUT)
    for tracing in tracings.values():
        tracing.stop()
    pipe.send("")
    last["spans"] = pipe.recv()
    process.join()
    return last


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--turns", type=int, default=15, help="runs of each arm on each stream")


if __name__ == "__main__":
    harness.main("decision_log", "The decision log and traces", __doc__, options, measure)
