"""Engines that have disconnected: what is shown of them, and how many of them are kept."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from meridian.v1 import agent_pb2, fleet_pb2

from meridian_control.capabilities.handover.fleet import FleetHandovers
from meridian_control.capabilities.listed import CAPABILITIES
from meridian_control.common.errors import InvalidRequest
from meridian_control.common.slices import at_once
from meridian_control.fleet.departed import FORGET_AFTER_S, MAX_BYTES, MAX_ENGINES, Departed
from meridian_control.fleet.fleet import Fleet
from tests.fakes.agent import hello

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def names(departed: Departed) -> list[str]:
    return [engine.engine_id for engine in departed.views(NOW)]


@pytest.mark.parametrize(("size", "left"), [(0, MAX_ENGINES), (60_000, MAX_BYTES // 60_100)])
def test_the_newest_few_are_kept(size: int, left: int) -> None:
    departed = Departed()
    for number in range(2 * MAX_ENGINES):
        departed.add_engine(fleet_pb2.Engine(engine_id=f"{number:05}", fault="x" * size), 1.0, NOW)
        departed.forget(NOW)
    assert names(departed) == [f"{number:05}" for number in range(2 * MAX_ENGINES - left, 2 * MAX_ENGINES)]
    assert departed._bytes <= MAX_BYTES


def test_one_that_comes_back_is_not_gone() -> None:
    departed = Departed()
    for name in ("a", "b", "a"):
        departed.add_engine(fleet_pb2.Engine(engine_id=name), 1.0, NOW)
    assert names(departed) == ["b", "a"], "engines are listed by the time of their last departure"
    departed.remove("b")
    departed.remove("never seen")
    assert names(departed) == ["a"]
    assert departed.forget(NOW + timedelta(seconds=FORGET_AFTER_S)) == []
    assert departed.forget(NOW + timedelta(seconds=FORGET_AFTER_S + 1)) == ["a"]
    assert (len(departed), departed._bytes) == (0, 0)


def test_its_state_follows_from_its_lease() -> None:
    departed = Departed()
    departed.add_engine(fleet_pb2.Engine(engine_id="a", agent_state=agent_pb2.AGENT_STATE_READY), 30.0, NOW)
    for after_s, state in ((30, agent_pb2.AGENT_STATE_STALE), (31, agent_pb2.AGENT_STATE_DEGRADED)):
        (engine,) = departed.views(NOW + timedelta(seconds=after_s))
        assert engine.agent_state == state


def test_the_last_engine_of_a_fleet_is_shown_no_longer_than_others() -> None:
    departed = Departed()
    departed.add_engine(fleet_pb2.Engine(engine_id="a"), 30.0, NOW)
    assert list(departed.views(NOW + timedelta(seconds=FORGET_AFTER_S)))
    assert not list(departed.views(NOW + timedelta(seconds=FORGET_AFTER_S + 1)))


async def test_the_late_end_of_a_stream_leaves_its_successors_handovers_alone() -> None:
    fleet, told = Fleet(lambda: NOW, capabilities=CAPABILITIES), agent_pb2.ConnectRequest()
    told.snapshot.requests.add(slot=0, request_id="r", handed_over_ref="e-1", phase=agent_pb2.PHASE_OUTPUT)
    older = fleet.join(hello("a"))
    at_once(fleet.receiving(older, told))
    newer = fleet.join(hello("a"))
    at_once(fleet.receiving(newer, told))
    fleet.leave(older, "disconnected")
    assert [one.state for one in fleet.part(FleetHandovers).results.continued()] == [fleet_pb2.CONTINUED_STATE_LIVE]
    fleet.leave(newer, "disconnected")
    assert [one.state for one in fleet.part(FleetHandovers).results.continued()] == [fleet_pb2.CONTINUED_STATE_GONE]


async def test_the_old_stream_of_an_engine_that_is_back_does_not_speak_for_it() -> None:
    now, names = [NOW], [f"e{number}" for number in range(8)]
    fleet = Fleet(lambda: now[0], capabilities=CAPABILITIES)
    for said in ({"incarnation": "b", "model": "old"}, {"incarnation": "a", "state": agent_pb2.AGENT_STATE_READY}):
        now[0] += timedelta(seconds=1)
        for name in names:
            fleet.join(hello(name, **said))
    assert fleet.views.agent_states() == dict.fromkeys(names, agent_pb2.AGENT_STATE_READY)
    assert {fleet.views.subject(name, "").served_model for name in names} == {"m"}


@pytest.mark.parametrize("said", ["x" * 513, "two\nlines", "\x00"])
def test_ids_that_would_fill_the_log_are_refused(said: str) -> None:
    fleet = Fleet(lambda: NOW, capabilities=CAPABILITIES)
    for name in ("engine_id", "incarnation"):
        first = hello("e")
        setattr(first, name, said)
        with pytest.raises(InvalidRequest, match=f"hello.{name} must have at most 512 characters, all printable; got"):
            fleet.join(first)
    assert not fleet.connections
