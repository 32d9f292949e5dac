"""The engines that each session may hand requests over to: those of its replica, and those of the others."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest
from meridian.v1 import fleet_pb2

from meridian_control.capabilities.handover.fleet import KEEP, HandoverPool
from meridian_control.capabilities.handover.stream import EngineHandovers
from meridian_control.engine.session import Session
from meridian_control.fleet.whole_fleet import CONNECTED
from tests.fakes.parts import engine_view
from tests.unit.control.capabilities.handover.engines import ANSWERING, NOW, HandMade, answering, disagg, hello

POLICY = disagg()


def ready(engine_id: str, labels: dict[str, str]) -> HandMade:
    made = HandMade(POLICY, hello(engine_id, labels))
    made.report()
    return made


def given(pool: HandoverPool, *sessions: Session, now: datetime = NOW) -> dict[str, list[fleet_pb2.AnsweringEngine]]:
    """Return the engines that each session whose engines have changed is given, and give them."""
    found = {}
    for session, engines in list(pool.changed(sessions, now)):
        session.part(EngineHandovers).pool = tuple(engines)
        found[session.hello.engine_id] = engines
    return found


def names(engines: list[fleet_pb2.AnsweringEngine]) -> list[str]:
    return [engine.engine_id for engine in engines]


def test_a_session_gets_the_engines_of_its_pool_whenever_they_change() -> None:
    pool = HandoverPool()
    a, b, c = ready("a", {"pool": "think"}), ready("b", ANSWERING), ready("c", ANSWERING)
    told = given(pool, a.session, b.session, c.session)
    assert {engine: names(engines) for engine, engines in told.items()} == {"a": ["b", "c"]}
    assert given(pool, a.session, b.session, c.session) == {}
    c.report(kv_used=0.5)
    changed = given(pool, a.session, b.session, c.session)
    assert [engine.kv_used for engine in changed["a"]] == [0, 0.5]
    assert names(given(pool, a.session, b.session)["a"]) == ["b"]


def test_nothing_is_given_under_a_policy_without_handovers() -> None:
    off = HandMade(disagg(enabled=False), hello("a"))
    assert given(HandoverPool(), off.session, ready("b", ANSWERING).session) == {}


def test_engines_of_other_replicas_are_known_until_their_replica_is_silent_for_long() -> None:
    pool, a = HandoverPool(), ready("a", {"pool": "think"})
    far = engine_view(ready("far", ANSWERING).session)
    gone = fleet_pb2.Engine(engine_id="gone", answering_engine=answering("gone"))
    assert far.state == CONNECTED
    pool.hear({"other": [far, gone]}, NOW)
    (engine,) = given(pool, a.session)["a"]
    assert (engine.engine_id, engine.url, engine.unfit) == ("far", "http://far:8000", "")
    assert given(pool, a.session, now=NOW + KEEP) == {}
    assert given(pool, a.session, now=NOW + KEEP + timedelta(seconds=1)) == {"a": []}


SEVEN = fleet_pb2.PromisedRequests(requests=2, blocks=7)


def test_an_engine_is_given_with_what_others_have_promised_to_it() -> None:
    pool = HandoverPool()
    first, second, b = ready("a1", {"pool": "think"}), ready("a2", {"pool": "think"}), ready("b", ANSWERING)
    given(pool, first.session, second.session, b.session)
    assert len(first.report(opened=[first.opened()], kv_used=0.95)) == 1
    away = fleet_pb2.Engine(engine_id="a3", state=CONNECTED, promised={"b": SEVEN})
    away.answering_engine.CopyFrom(answering("a3", labels={"pool": "think"}))
    pool.hear({"other": [away]}, NOW)
    told = given(pool, first.session, second.session, b.session)
    assert {name: (e.promised.requests, e.promised.blocks) for name in ("a1", "a2") for e in told[name]} == {
        "a1": (2, 7),
        "a2": (3, 17),
    }


@pytest.mark.parametrize("order", [1, -1])
def test_an_engine_counts_as_its_newest_stream_shows_it(order: int) -> None:
    """An engine has moved from one replica to another, and the first one has not noticed yet."""
    pool, a = HandoverPool(), ready("a", {"pool": "think"})
    streams = {"before": (-60, 0.75, 7), "after": (-30, 0.5, 2)}
    heard = {}
    for replica, (since_s, kv_used, requests) in list(streams.items())[::order]:
        took, gave = (fleet_pb2.Engine(engine_id=name, state=CONNECTED) for name in ("b", "a2"))
        took.answering_engine.CopyFrom(answering("b", kv_used=kv_used))
        gave.promised["b"].requests = requests
        for engine in (took, gave):
            engine.connect_time.FromDatetime(NOW + timedelta(seconds=since_s))
        heard[replica] = [took, gave]
    pool.hear(heard, NOW)
    (answers,) = given(pool, a.session)["a"]
    assert (answers.kv_used, answers.promised.requests) == (0.5, 2)


def test_a_frozen_engine_says_so() -> None:
    frozen = HandMade(POLICY, hello("b", ANSWERING))
    frozen.report()
    frozen.session.freezing.frozen = True
    assert frozen.session.part(EngineHandovers).answering_engine().unfit == "it is frozen"
