"""Measure how much the decision log and traces cost a session: `python -m tests.bench.decision_log`.

Protocol: a recorded stream is given repeatedly to a new session, with its recorded times. The stream has 64 requests at
once over 1,000 steps of a fake engine; each request thinks 50 to 800 tokens and answers up to 100, EAT probes run every
64 tokens, and all rules are on. There are three such streams: the agent merges up to 24 steps into a report, as it does
under the default policy, or up to eight, as it does while a rule is in force, or it reports each step. The four arms
are: no log, the log, the log and traces of 1 % of the requests, and the log and traces of all requests. The arms take
turns in changing order, 15 runs of each after one of each to warm up. The measure is the process time of the session's
own work and, with traces, of the SDK's thread up to the export of the last span to a collector in another process.
Parsing the messages and connecting to the collector are not measured. The garbage collector runs as in the server, and
looks at what a stream has left at its end, within the measured time.
Ratios are taken within each turn, and their medians reported, beside the ratio of each arm's least times, which other
programs on the machine disturb less. The last line is JSON.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import statistics
import sys
import time
from typing import TYPE_CHECKING

from meridian.v1 import agent_pb2

from meridian_agent.core.step_record import StepRecord
from meridian_agent.link.messages import mergeable, step_report
from meridian_control.app.garbage import FLOOD, NEVER, NEWEST
from meridian_control.capabilities.listed import STREAM_PARTS
from meridian_control.engine.session import Session
from meridian_control.journal.journal import Journal
from meridian_control.journal.log import DecisionLog
from meridian_control.telemetry.request_traces import Tracing
from tests.contract.control.telemetry.test_tracing import Collector
from tests.fakes.agent import FakeAgent
from tests.fakes.tables import policy
from tests.unit.sessions import NOW, Stream

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

AT_ONCE, STEPS, TURNS = 64, 1000, 15
# Most steps in a report of each stream.
STREAMS = {"default": 24, "merged": 8, "single": 1}
WITHOUT, LOG, SOME, ALL = "without", "log", "traces of 1 %", "traces of all"
RATIOS = {SOME: 0.01, ALL: 1.0}
POLICY = policy(entropy={"shadow": True, "rank_conditions": [{"max_ranks": [5, 5]}]})


class MergingAgent(FakeAgent):
    """A fake agent that merges up to `most` steps into a report."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most, self._records = most, list[StepRecord]()

    def _report(self) -> StepRecord:
        record = self.engine.tracker.record
        record.step_time_ms = self.step_cost_ms[0]
        record = self.engine.take()
        record.ended_s = record.step * record.step_time_ms / 1e3
        if self._records and not mergeable(self._records, record):
            self._send()
        self._records.append(record)
        if len(self._records) == self._most:
            self._send()
        return record

    def _send(self) -> None:
        self.say(step=step_report(self._records, byte_columns=True))
        self._records = []


def recorded(most: int) -> Stream:
    made = Stream(agent=MergingAgent(most), hello_fields={"num_blocks": 1 << 16})
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
    log = DecisionLog(ended=tracing.over) if tracing is not None else DecisionLog()
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


def measure(made: Stream, tracings: dict[str, Tracing]) -> dict[str, object]:
    """Measure the arms on one stream, print the results and return the figures."""
    arms, turns = [WITHOUT, LOG, *tracings], list[dict[str, float]]()
    gc.collect()
    gc.freeze()
    for turn in range(TURNS + 1):
        order = arms[turn % 4 :] + arms[: turn % 4]
        turns.append({arm: seconds(made, arm, tracings.get(arm)) for arm in order})
    totals, turns = made.session.totals, turns[1:]
    decisions = sum(totals.decisions.values()) - totals.decisions["plan"]
    print(f"{totals.token_events} tokens, {totals.reports} reports, {totals.requests} requests, {decisions} decisions")
    figures: dict[str, object] = {"decisions": decisions, "reports": totals.reports}
    least = {arm: min(turn[arm] for turn in turns) for arm in arms}
    for arm in arms:
        per_s = totals.token_events / statistics.median(turn[arm] for turn in turns)
        ratios = [statistics.median(turn[arm] / turn[base] for turn in turns) for base in (WITHOUT, LOG)]
        of = {"of_without": ratios[0], "of_without_least": least[arm] / least[WITHOUT], "of_log": ratios[1]}
        told = "time {of_without:.3f} of without (least times {of_without_least:.3f}), {of_log:.3f} of log".format(**of)
        print(f"{arm:14} {per_s:9,.0f} token events per second; {told}")
        figures[arm] = {"per_second": round(per_s)} | {name: round(ratio, 3) for name, ratio in of.items()}
    return figures


def main() -> int:
    gc.set_threshold(FLOOD, gc.get_threshold()[1], NEVER)
    pipe, other = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=collect, args=(other,))
    process.start()
    endpoint = f"127.0.0.1:{pipe.recv()}"
    tracings = {arm: Tracing(endpoint, ratio) for arm, ratio in RATIOS.items()}
    figures: dict[str, object] = {}
    for name, most in STREAMS.items():
        print(f"reports of up to {most} steps")
        figures[name] = measure(recorded(most), tracings)
    for tracing in tracings.values():
        tracing.stop()
    pipe.send("")
    spans = pipe.recv()
    process.join()
    print(f"{spans} spans arrived")
    print(json.dumps(figures | {"spans": spans}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
