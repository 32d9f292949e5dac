"""What the decision log costs a session: `python -m tests.bench.decision_log`.

Protocol: one recorded stream (64 requests at once, 1,000 steps of a fake engine, each request thinks 50 to 800 tokens
and answers up to 100, EAT probes every 64 tokens, all rules on), given to a new session with its recorded times, over
and over: once with the log, once without, taking turns, 15 of each after one of each to warm up. Process time of the
session's own work; messages are parsed before. The ratio is taken of each pair, and its median reported. The last line
is JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

from meridian.v1 import agent_pb2

from meridian_control.decision_log import DecisionLog, Journal
from meridian_control.session import Session
from tests.fakes.tables import policy
from tests.unit.test_session import NOW, Stream

AT_ONCE, STEPS, PAIRS = 64, 1000, 15
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


def seconds(made: Stream, log: DecisionLog | None) -> float:
    """Process time of the whole stream."""
    journal = Journal(log, "engine", "1", "s", NOW) if log is not None else None
    session = Session("s", made.hello, NOW, journal)
    begun = time.process_time()
    for now, message in made.trace:
        if isinstance(message, agent_pb2.ConnectRequest):
            session.on_message(message, now)
        else:
            session.on_policy(*message)
    return time.process_time() - begun


def main() -> int:
    made = recorded()
    pairs = []
    for pair in range(PAIRS + 1):
        order = (True, False) if pair % 2 else (False, True)
        took = {with_log: seconds(made, DecisionLog() if with_log else None) for with_log in order}
        if pair:
            pairs.append((took[True], took[False]))
    totals = made.session.totals
    with_log, without = (totals.token_events / statistics.median(side) for side in zip(*pairs, strict=True))
    ratio = statistics.median(one / other for one, other in pairs)
    decisions = sum(totals.decisions.values()) - totals.decisions["plan"]
    print(f"{totals.token_events} tokens, {totals.requests} requests, {decisions} decisions about them")
    print(f"token events per second: {with_log:,.0f} with the log, {without:,.0f} without; time ratio {ratio:.3f}")
    figures = {"with_log": round(with_log), "without": round(without), "time_ratio": round(ratio, 3)}
    print(json.dumps(figures | {"decisions": decisions, "token_events": totals.token_events}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
