"""What one engine is told of freezes, and which of its confirmations count."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import permutations

import pytest
from meridian.v1 import agent_pb2

from meridian_control.capabilities.listed import CAPABILITIES
from meridian_control.engine.freeze_state import Freeze, FreezeState, Match
from meridian_control.fleet.connection import Connection
from meridian_control.fleet.fleet import Fleet
from tests.fakes.agent import hello

NOW = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)


def seconds(number: float) -> timedelta:
    return timedelta(seconds=number)


def freeze(duration_s: float, freeze_id: int = 1) -> Freeze:
    return Freeze(freeze_id, Match(), "ann", "why", NOW, NOW + seconds(duration_s))


def status(nonce: int, frozen: bool) -> agent_pb2.FreezeStatus:
    return agent_pb2.FreezeStatus(nonce=nonce, frozen=frozen)


# ------------------------------------------------------------------------------------------------------ remaining time


def test_an_engine_is_told_the_time_that_is_left() -> None:
    state = FreezeState(agent_pb2.FreezeStatus())
    assert state.set_freezes((freeze(20),), NOW).remaining_ms == 20_000
    told = [state.message(NOW + seconds(passed)).remaining_ms for passed in (0.0, 7.5, 12.0, 19.999, 20.0, 60.0)]
    assert told == [20_000, 12_500, 8_000, 1, 0, 0]


def test_an_engine_is_told_of_the_freeze_that_ends_last() -> None:
    """An agent whose control plane dies must stay frozen until all its freezes have ended."""
    for freezes in permutations([freeze(600, 1), freeze(60, 2), freeze(300, 3)]):
        assert FreezeState(agent_pb2.FreezeStatus()).set_freezes(freezes, NOW + seconds(120)).remaining_ms == 480_000


@pytest.mark.parametrize("back", [seconds(1), HOUR, 400 * 24 * HOUR], ids=str)
def test_a_clock_that_was_set_back_makes_no_freeze_longer_than_it_was(back: timedelta) -> None:
    state = FreezeState(agent_pb2.FreezeStatus())
    assert state.set_freezes((freeze(20),), NOW - back).remaining_ms == 20_000
    assert state.message(NOW - back).remaining_ms == 20_000


def freezes_sent(connection: Connection) -> list[agent_pb2.Freeze]:
    sent = [connection.outgoing.get_nowait() for _ in range(connection.outgoing.qsize())]
    return [each.freeze for each in sent if each is not None and each.WhichOneof("message") == "freeze"]


async def test_each_reconnect_of_an_engine_brings_what_is_left() -> None:
    """An agent that reconnects every 3 seconds never stays frozen beyond the freeze's end."""
    now = NOW
    fleet = Fleet(lambda: now, capabilities=CAPABILITIES)
    fleet.freezes.renew((freeze(20),))
    told = []
    for passed in range(0, 20, 3):
        now = NOW + seconds(passed)
        connection = fleet.join(hello("engine"))
        (sent,) = freezes_sent(connection)
        told.append(sent.remaining_ms)
        fleet.leave(connection, "disconnected")
    assert told == [20_000, 17_000, 14_000, 11_000, 8_000, 5_000, 2_000]
    now = NOW + seconds(20)
    assert freezes_sent(fleet.join(hello("engine"))) == []
    fleet.freezes.renew(())


# ------------------------------------------------------------------------------------------------------- confirmations


def test_only_the_confirmation_of_the_newest_freeze_counts() -> None:
    state = FreezeState(agent_pb2.FreezeStatus())
    first, second = state.set_freezes((freeze(60),), NOW), state.set_freezes((), NOW)
    assert (first.nonce, second.nonce) == (1, 2)
    third = state.set_freezes((freeze(60, 2),), NOW)
    # The agent's answers to the first freeze and to the thaw arrive after the newest freeze was sent.
    assert not state.take_confirmation(status(first.nonce, True))
    assert not state.confirmed
    assert not state.take_confirmation(status(second.nonce, False)), "the engine has not thawed"
    assert (state.confirmed, state.frozen) == (False, True)
    assert not state.take_confirmation(status(third.nonce, True))
    assert (state.confirmed, state.frozen) == (True, True)
    fourth = state.set_freezes((), NOW)
    assert first.nonce < second.nonce < third.nonce < fourth.nonce
    for old in (first, second, third):
        assert not state.take_confirmation(status(old.nonce, False)), "an old confirmation cannot end a freeze"
        assert state.frozen
    assert state.take_confirmation(status(fourth.nonce, False))
    assert not state.frozen
