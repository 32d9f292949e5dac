"""How many engines a replica sends to the others, and which."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pytest
from meridian.v1 import agent_pb2

from meridian_control.capabilities.listed import CAPABILITIES
from meridian_control.fleet.balance import MORE, SHARE, STAYS, Balance
from meridian_control.fleet.fleet import Fleet
from tests.fakes.agent import hello


class Spread:
    """Replicas whose engines come back at a random replica, or at the same one if `pinned`, a minute later.

    engines: the number of engines that each replica has first.
    """

    def __init__(self, engines: Sequence[int], pinned: bool = False) -> None:
        self.now, self.pinned, self.rng = datetime(2026, 1, 1, tzinfo=UTC), pinned, random.Random(1)
        self.fleets = [Fleet(lambda: self.now, capabilities=CAPABILITIES) for _ in engines]
        self.balances = [Balance(fleet, lambda me=fleet: self.others(me)) for fleet in self.fleets]  # type: ignore[misc]
        self.unknown: set[int] = set()
        for number, (fleet, count) in enumerate(zip(self.fleets, engines, strict=True)):
            for engine in range(count):
                fleet.join(hello(f"{number}-{engine}"))

    def others(self, me: Fleet) -> list[int | None]:
        return [
            None if number in self.unknown else len(fleet.connections)
            for number, fleet in enumerate(self.fleets)
            if fleet is not me
        ]

    @property
    def counts(self) -> list[int]:
        return [len(fleet.connections) for fleet in self.fleets]

    def minute(self) -> list[str]:
        """Let a minute pass; return the ids of the engines that were sent away."""
        self.now += timedelta(minutes=1)
        for balance in self.balances:
            balance.look()
        sent = [(fleet, c) for fleet in self.fleets for c in list(fleet.connections) if c.closing == "going_away"]
        for fleet, connection in sent:
            fleet.leave(connection, "going_away")
            (fleet if self.pinned else self.rng.choice(self.fleets)).join(connection.session.hello)
        return [connection.session.hello.engine_id for _, connection in sent]


@pytest.mark.parametrize("engines", [(300, 0, 0), (150, 150, 0), (1000, 0), (40, 40, 0, 0)])
def test_replicas_come_near_the_mean_and_then_send_nobody(engines: tuple[int, ...]) -> None:
    """As after replicas were added, or started again one after another."""
    spread, mean = Spread(engines), sum(engines) / len(engines)
    minutes = 0
    while max(spread.counts) > SHARE * mean + MORE:
        sent, before = spread.minute(), spread.counts
        assert 0 < len(sent) <= sum(count // 10 + 1 for count in engines)
        assert sum(before) == sum(engines)
        minutes += 1
    assert minutes <= 40
    assert [spread.minute() for _ in range(60)] == [[]] * 60


def test_few_engines_and_unknown_replicas_move_nobody() -> None:
    assert not Spread((2 * MORE, 0)).minute(), "the mean is MORE below"
    assert not Spread((100,)).minute()
    spread = Spread((100, 0))
    spread.unknown = {1}
    assert not spread.minute(), "a replica of an older version may have any number"


def test_few_engines_that_know_no_other_replica_are_sent_away_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    """As also if a replica lives that agents do not reach: each end of a stream costs a part of what is known."""
    spread, stays = Spread((60, 0), pinned=True), STAYS // timedelta(minutes=1)
    sent = [spread.minute() for _ in range(stays)]
    assert [len(engines) for engines in sent] == [6, 6] + [0] * (stays - 2)
    assert len({*sent[0], *sent[1]}) == 12
    assert [record.getMessage() for record in caplog.records] == [
        "12 of 12 engines that were sent away came back: do agents reach other replicas?"
    ]
    assert [len(spread.minute()) for _ in range(3)] == [6, 6, 0]


def test_an_engine_whose_stream_ends_anyway_is_not_sent_away() -> None:
    spread = Spread((40, 0))
    (fleet, _), reasons = spread.fleets, ["overflow"] * 36
    for connection, reason in zip(fleet.connections, reasons, strict=False):
        connection.close(reason)
    spread.balances[0].look()
    assert [c.closing for c in fleet.connections] == [*reasons, *["going_away"] * 4]


def test_engines_without_requests_go_first() -> None:
    spread = Spread((40, 0))
    for number, connection in enumerate(spread.fleets[0].connections):
        if number % 10:
            opened = agent_pb2.RequestOpened(slot=0, request_id="a")
            connection.session.table.open(opened)
    assert sorted(spread.minute()) == ["0-0", "0-10", "0-20", "0-30"]
