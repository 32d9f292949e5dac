"""What became of requests that were to be handed over: one result each, whatever the order of the reports."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meridian.v1 import agent_pb2, fleet_pb2

from meridian_control.capabilities.handover.results import (
    CLIENT_GONE,
    FINISHED,
    HANDED_OVER,
    KEEP,
    MAX_CONTINUED,
    RECOMPUTED,
    RESULTS,
    WAIT,
    Handover,
    Handovers,
)
from meridian_control.capabilities.handover.rule import Move
from tests.unit.control.capabilities.handover.engines import NOW, answering, pending

A, B, C = ("a", "1", "on-a"), ("b", "1", "on-b"), ("c", "1", "on-c")
STOP, ABORT = agent_pb2.FINISH_REASON_STOP, agent_pb2.FINISH_REASON_ABORT
LATE = NOW + WAIT


def decided(ref: str = "r", engine_id: str = "b") -> tuple[Handovers, Handover]:
    made, results = Handover(ref, Move(0, 9, "kv_pressure", answering(engine_id))), Handovers()
    results.decided(A, made)
    return results, made


def stop(results: Handovers) -> None:
    results.closed(A, agent_pb2.RequestClosed(reason=STOP, handed_over=True), NOW)


def test_a_request_that_nobody_continues() -> None:
    results, made = decided()
    stop(results)
    results.expire(LATE - timedelta(milliseconds=1))
    assert made.result == ""
    results.expire(LATE)
    assert (made.result, results.total()) == (CLIENT_GONE, Counter({CLIENT_GONE: 1}))


def test_the_result_belongs_to_the_decision_that_the_relay_obeyed() -> None:
    results, first = decided("old")
    second = Handover("new", Move(0, 9, "kv_pressure", answering("c")))
    results.decided(A, second)
    stop(results)
    results.opened("old", B, NOW)
    results.first_token("old", B, 160, 30.0, NOW)
    assert (first.result, second.result) == (HANDED_OVER, "")


def test_results_outlive_their_engines() -> None:
    results, _ = decided()
    results.closed(A, agent_pb2.RequestClosed(reason=STOP), NOW)
    assert results.results == {"a": Counter({FINISHED: 1})}
    results.forget(["a", "unknown"])
    assert (results.results, results.total()) == ({"": Counter({FINISHED: 1})}, Counter({FINISHED: 1}))


def test_other_replicas_hear_of_continued_requests_for_a_while() -> None:
    here, there = Handovers(), decided()
    here.opened("r", B, NOW)
    here.first_token("r", B, 160, 30.0, NOW)
    here.continuation_closed("r", B, STOP, NOW)
    (told,) = here.continued()
    for _ in range(2):
        there[0].take_continuation(fleet_pb2.ContinuedRequest.FromString(told.SerializeToString()), NOW)
    assert there[1].result == HANDED_OVER
    here.expire(NOW + KEEP)
    assert here.continued()
    here.expire(NOW + KEEP + timedelta(seconds=1))
    assert here.continued() == []


def test_a_replica_that_says_no_more_of_a_continuation() -> None:
    results, made = decided()
    stop(results)
    for after in (timedelta(), WAIT):
        happen(results, "told b", after)
    results.expire(LATE)
    assert (made.result, pending(results)) == ("", 1)
    results.expire(LATE + WAIT)
    assert (made.result, pending(results), results._by_ref) == (CLIENT_GONE, 0, {})


def test_the_oldest_continuations_go_first() -> None:
    results = Handovers()
    for number in range(MAX_CONTINUED + 1):
        results.opened(f"r{number % 2}", ("b", "1", str(number)), NOW)
    kept = [continued.request_id for continued in results.continued()]
    assert kept == [str(number) for number in range(1, MAX_CONTINUED + 1)]


# Events of a request on its thinking engine, on its answering engine and on another engine, and the passing of time.
EVENTS = (
    *("stopped", "finished", "aborted", "lost a", "back a", "again", "expire", "later"),
    *(
        f"{event} {engine}"
        for event in ("open", "token", "empty", "finish", "abort", "lost", "listed", "told")
        for engine in "bc"
    ),
)


def happen(results: Handovers, event: str, now: timedelta) -> None:
    """Let one event happen; `told` is a message of another replica."""
    kind, _, name = event.partition(" ")
    key, at = {"b": B, "c": C}.get(name, A), NOW + now
    if kind in ("stopped", "finished", "aborted"):
        reason = ABORT if kind == "aborted" else STOP
        results.closed(A, agent_pb2.RequestClosed(reason=reason, handed_over=kind == "stopped"), at)
    elif kind == "lost":
        results.lost(key[:2], at)
    elif kind in ("back", "listed"):
        results.relisted(key[:2], {key[2]}, at)
    elif kind == "again":
        results.decided(A, Handover("r2", Move(0, 9, "kv_pressure", answering("c"))))
    elif kind == "expire":
        results.expire(at)
    elif kind == "open":
        results.opened("r", key, at)
    elif kind == "told":
        state = fleet_pb2.CONTINUED_STATE_LIVE
        told = fleet_pb2.ContinuedRequest(ref="r", engine_id=name, request_id="elsewhere", state=state)
        results.take_continuation(told, at)
    elif kind in ("token", "empty"):
        results.first_token("r", key, 160 * (kind == "token"), 30.0, at)
    elif kind in ("finish", "abort"):
        results.continuation_closed("r", key, STOP if kind == "finish" else ABORT, at)


TRANSFERRED, NONE = (f"{tokens} tokens transferred to b, first token after 30 ms" for tokens in (160, 0))


@pytest.mark.parametrize(
    ("events", "result", "detail"),
    [
        # The answering engine continues the request.
        ("stopped, open b, token b", HANDED_OVER, TRANSFERRED),
        ("open b, token b", HANDED_OVER, TRANSFERRED),
        ("stopped, open b, empty b", RECOMPUTED, NONE),
        ("open b, empty b", RECOMPUTED, NONE),
        # A thinking engine continues the request.
        ("stopped, open a", FINISHED, "continued on a"),
        ("stopped, open c", FINISHED, "continued on c"),
        # The answering engine dies before its first token.
        ("stopped, open b, lost b, open a", FINISHED, "continued on a"),
        # The request is never stopped.
        ("finished", FINISHED, ""),
        ("aborted", CLIENT_GONE, ""),
        # A stream that comes back goes on with its requests.
        ("lost a, back a, expire, finished", FINISHED, ""),
    ],
)
def test_what_becomes_of_a_request(events: str, result: str, detail: str) -> None:
    results, made = decided()
    *before, last = events.split(", ")
    for event in before:
        happen(results, event, WAIT if event == "expire" else timedelta())
        assert (made.result, pending(results)) == ("", 1)
    happen(results, last, timedelta())
    # The thinking engine may close the request after the answering engine has begun.
    for later in ("stopped", "finish b") if not {"stopped", "finished", "aborted"} & {*before, last} else ("finish b",):
        assert (made.result, detail in made.detail) == (result, True)
        happen(results, later, timedelta())
    results.expire(LATE)
    assert (results.total(), pending(results)) == (Counter({result: 1}), 0)


@settings(max_examples=150)
@given(st.lists(st.sampled_from(EVENTS), max_size=12))
def test_every_request_has_exactly_one_result(events: list[str]) -> None:
    results, _ = decided()
    now, closed = timedelta(), False
    for event in events:
        if event == "later":
            now += WAIT / 2
        elif event == "again" and (closed or not pending(results)):
            # A decision is made only about a request that lives.
            continue
        elif event in ("stopped", "finished", "aborted", "back a") and closed:
            # A request closes once, and does not live again.
            continue
        else:
            happen(results, event, now)
        closed |= event in ("stopped", "finished", "aborted")
        assert sum(results.total().values()) + pending(results) == 1
    # Both engines go away in the end.
    for event in ("lost a", "lost b", "lost c"):
        happen(results, event, now)
    results.expire(NOW + now + 2 * WAIT)
    assert sum(results.total().values()) == 1
    assert pending(results) == 0
    assert set(results.total()) <= set(RESULTS)
    assert not results._requests
    assert not results._by_ref
    results.expire(NOW + now + KEEP + timedelta(seconds=1))
    assert not results._continued
    assert not results._continuing
