"""Measure how much the decision log and traces cost a session: `python -m tests.bench.decision_log`.

Protocol: one recorded stream is given repeatedly to a new session, with its recorded times. The stream has 64 requests
at once over 1,000 steps of a fake engine; each request thinks 50 to 800 tokens and answers up to 100, EAT probes run
every 64 tokens, and all rules are on. The four arms are: no log, the log, the log and traces of 1 % of the requests,
and the log and traces of all requests. The arms take turns in changing order, 15 runs of each after one of each to warm
up. The measure is the process time of the session's own work and, with traces, of the SDK's thread up to the export of
the last span to a collector in another process. Parsing the messages and connecting to the collector are not measured.
Ratios are taken within each turn, and their medians reported. The last line is JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
import time
from typing import TYPE_CHECKING

from meridian.v1 import agent_pb2

from meridian_control.decision_log.journal import Journal
from meridian_control.decision_log.log import DecisionLog
from meridian_control.session.session import Session
from meridian_control.telemetry.request_traces import Tracing
from tests.contract.control.telemetry.test_tracing import Collector
from tests.fakes.tables import policy
from tests.unit.sessions import NOW, Stream

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

AT_ONCE, STEPS, TURNS = 64, 1000, 15
WITHOUT, LOG, SOME, ALL = "without", "log", "traces of 1 %", "traces of all"
RATIOS = {SOME: 0.01, ALL: 1.0}
POLICY = policy(entropy={"shadow": True, "rank_conditions": [{"max_ranks": [5, 5]}]})


def recorded() -> Stream:
    made = Stream(hello_fields={"num_blocks": 1 << 16})
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
    session = Session("s", made.hello, NOW, Journal(log, "engine", "1", "s", NOW) if arm != WITHOUT else None)
    begun = time.process_time()
    for now, message in made.trace:
        if isinstance(message, agent_pb2.ConnectRequest):
            session.on_message(message, now)
        else:
            session.on_policy(*message)
    if tracing is not None:
        tracing._provider.force_flush()
    return time.process_time() - begun


def collect(pipe: Connection) -> None:
    """Serve as a collector until the pipe says stop; send the port first, and at the end the number of spans
    received."""
    collector = Collector()
    pipe.send(collector.port)
    pipe.recv()
    collector.server.stop(None).wait()
    pipe.send(len(collector.spans))


def main() -> int:
    made, turns = recorded(), list[dict[str, float]]()
    pipe, other = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=collect, args=(other,))
    process.start()
    endpoint = f"127.0.0.1:{pipe.recv()}"
    arms = [WITHOUT, LOG, SOME, ALL]
    tracings = {arm: Tracing(endpoint, ratio) for arm, ratio in RATIOS.items()}
    for turn in range(TURNS + 1):
        order = arms[turn % 4 :] + arms[: turn % 4]
        turns.append({arm: seconds(made, arm, tracings.get(arm)) for arm in order})
    for tracing in tracings.values():
        tracing.stop()
    pipe.send("")
    spans = pipe.recv()
    process.join()
    totals, turns = made.session.totals, turns[1:]
    decisions = sum(totals.decisions.values()) - totals.decisions["plan"]
    print(f"{totals.token_events} tokens, {totals.requests} requests, {decisions} decisions about them")
    figures = {}
    for arm in arms:
        per_s = totals.token_events / statistics.median(turn[arm] for turn in turns)
        ratios = [statistics.median(turn[arm] / turn[base] for turn in turns) for base in (WITHOUT, LOG)]
        print(
            f"{arm:14} {per_s:9,.0f} token events per second; time {ratios[0]:.3f} of without, {ratios[1]:.3f} of log"
        )
        figures[arm] = {"per_second": round(per_s), "of_without": round(ratios[0], 3), "of_log": round(ratios[1], 3)}
    print(f"{spans} spans arrived")
    print(json.dumps(figures | {"decisions": decisions, "token_events": totals.token_events, "spans": spans}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
