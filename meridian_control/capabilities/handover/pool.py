"""Gives each session the engines to which its requests may be handed over, those of the other replicas included.

The module owns how old the facts about engines of other replicas may be. Time is passed in. All code runs on the
server's event loop.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from meridian.v1 import fleet_pb2

from meridian_control.capabilities.handover.stream import EngineHandovers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from datetime import datetime

    from meridian_control.engine.session import Session

CONNECTED = fleet_pb2.CONNECTION_STATE_CONNECTED
# Time for which the engines of a replica that does not answer count as they were.
KEEP = timedelta(seconds=5)
# Largest number that a message holds; what other replicas say may add up to more.
MOST = 2**32 - 1

Promises = list[tuple[str, str, fleet_pb2.PromisedRequests]]


class HandoverPool:
    """The engines of the fleet, as handovers see them."""

    def __init__(self) -> None:
        # The newest answer of each other replica, with its time.
        self._heard: dict[str, tuple[datetime, list[fleet_pb2.Engine]]] = {}
        # Whether a session could hand requests over when `changed` was last called; if not, no session has engines.
        self.is_used = False

    def hear(self, answers: dict[str, list[fleet_pb2.Engine]], now: datetime) -> None:
        """Take in the connected engines of the other replicas that answered, by the replicas' ids."""
        for replica_id, engines in answers.items():
            self._heard[replica_id] = now, [engine for engine in engines if engine.state == CONNECTED]

    def changed(
        self, sessions: Sequence[Session], now: datetime
    ) -> Iterator[tuple[Session, list[fleet_pb2.AnsweringEngine]]]:
        """Yield each session whose answering engines have changed, with these engines sorted by their ids. A replica
        that has not answered for longer than KEEP has none."""
        self._heard = {name: kept for name, kept in self._heard.items() if now - kept[0] <= KEEP}
        takers = {id(session) for session in sessions if session.policy is not None and session.policy.disagg.enabled}
        self.is_used = bool(takers)
        engines = self._engines(sessions) if takers else {}
        promises = list(self._promises(sessions)) if takers else []
        for session in sessions:
            mine = [] if id(session) not in takers else _for(session, engines.values(), promises)
            if mine != list(session.part(EngineHandovers).pool):
                yield session, mine

    def _engines(self, sessions: Iterable[Session]) -> dict[str, fleet_pb2.AnsweringEngine]:
        """Return the engines by id, in the order of their ids; an engine of this replica replaces what another
        replica has reported of it."""
        reported = [engine.answering_engine for _, engines in self._heard.values() for engine in engines]
        newest = sorted(sessions, key=lambda session: session.connected_at)
        own = (session.part(EngineHandovers).answering_engine() for session in newest)
        by_id = {answering.engine_id: answering for answering in (*reported, *own)}
        return dict(sorted(by_id.items()))

    def _promises(self, sessions: Iterable[Session]) -> Iterator[tuple[str, str, fleet_pb2.PromisedRequests]]:
        """Yield each thinking engine's id with an answering engine's id and what is promised to that engine."""
        for session in sessions:
            for answering, promised in session.part(EngineHandovers).promised().items():
                yield session.hello.engine_id, answering, promised
        for _, engines in self._heard.values():
            for engine in engines:
                for answering, promised in engine.promised.items():
                    yield engine.engine_id, answering, promised


def _for(
    session: Session, engines: Iterable[fleet_pb2.AnsweringEngine], promises: Promises
) -> list[fleet_pb2.AnsweringEngine]:
    """Return the engines of the session's answering pool, each with what other engines have promised to it."""
    assert session.policy is not None
    in_pool = []
    for engine in engines:
        if engine.engine_id == session.hello.engine_id or not session.policy.disagg.answers(engine.labels):
            continue
        copied = fleet_pb2.AnsweringEngine()
        copied.CopyFrom(engine)
        for thinking, answering, promised in promises:
            if answering == engine.engine_id and thinking != session.hello.engine_id:
                copied.promised.requests = min(MOST, copied.promised.requests + promised.requests)
                copied.promised.blocks = min(MOST, copied.promised.blocks + promised.blocks)
        in_pool.append(copied)
    return in_pool
