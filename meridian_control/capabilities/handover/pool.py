"""Gives each session the engines to which its requests may be handed over, those of the other replicas included.

The module owns how old the facts about engines of other replicas may be. Time is passed in. All code runs on the
server's event loop.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from datetime import timedelta
from typing import TYPE_CHECKING

from meridian.v1 import fleet_pb2

from meridian_control.capabilities.handover.stream import EngineHandovers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from datetime import datetime

    from meridian_control.engine.session import Session

CONNECTED = fleet_pb2.CONNECTION_STATE_CONNECTED
# Time for which the engines of a replica that does not answer count as they were.
KEEP = timedelta(seconds=5)
# Largest number that a message holds; what other replicas say may add up to more.
MOST = 2**32 - 1

# Numbers of promised requests and blocks: the keys are the answering engine's id with "requests" or "blocks".
Promises = Counter[tuple[str, str]]
NOTHING = Promises()


class HandoverPool:
    """The engines of the fleet, as handovers see them."""

    def __init__(self) -> None:
        # The newest answer of each other replica, with its time.
        self._heard: dict[str, tuple[datetime, list[fleet_pb2.Engine]]] = {}
        # The engines that sessions were given last, by id. An engine in which nothing changes stays the same object, so
        # that a comparison of two lists costs little.
        self._shared: dict[str, fleet_pb2.AnsweringEngine] = {}

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
        takers = {
            id(session): policy.disagg
            for session in sessions
            if (policy := session.policy) is not None
            and policy.disagg.enabled
            and policy.disagg.thinks(session.hello.labels)
        }
        by_thinking, promises = self._promises(sessions if takers else ()), Promises()
        for promised in by_thinking.values():
            promises.update(promised)
        engines = {name: _with(engine, promises) for name, engine in self._engines(sessions if takers else ()).items()}
        self._shared = {name: old if (old := self._shared.get(name)) == new else new for name, new in engines.items()}
        pools: dict[frozenset[tuple[str, str]], dict[str, fleet_pb2.AnsweringEngine]] = {}
        for session in sessions:
            mine: dict[str, fleet_pb2.AnsweringEngine] = {}
            if (disagg := takers.get(id(session))) is not None:
                labels, engine_id = frozenset(disagg.answering_pool.items()), session.hello.engine_id
                if labels not in pools:
                    pools[labels] = {name: e for name, e in self._shared.items() if disagg.answers(e.labels)}
                own = by_thinking[engine_id]
                promised_to = {name for name, _ in own} & pools[labels].keys()
                mine = pools[labels] | {name: _with(engines[name], promises, own) for name in promised_to}
                mine.pop(engine_id, None)
            if (given := list(mine.values())) != list(session.part(EngineHandovers).pool):
                yield session, given

    def _engines(self, sessions: Iterable[Session]) -> dict[str, fleet_pb2.AnsweringEngine]:
        """Return the engines by id, in the order of their ids; an engine of this replica replaces what another
        replica has reported of it."""
        reported = [engine.answering_engine for _, engines in self._heard.values() for engine in engines]
        newest = sorted(sessions, key=lambda session: session.connected_at)
        own = (session.part(EngineHandovers).answering_engine() for session in newest)
        by_id = {answering.engine_id: answering for answering in (*reported, *own)}
        return dict(sorted(by_id.items()))

    def _promises(self, sessions: Iterable[Session]) -> Mapping[str, Promises]:
        """Return what each thinking engine has promised, by the thinking engines' ids."""
        by_thinking = defaultdict[str, Promises](Counter)
        own = ((session.hello.engine_id, session.part(EngineHandovers).promised()) for session in sessions)
        reported = ((engine.engine_id, engine.promised) for _, engines in self._heard.values() for engine in engines)
        for thinking, by_answering in (*own, *reported):
            for answering, promised in by_answering.items():
                by_thinking[thinking][answering, "requests"] += promised.requests
                by_thinking[thinking][answering, "blocks"] += promised.blocks
        return by_thinking


def _with(engine: fleet_pb2.AnsweringEngine, promises: Promises, own: Promises = NOTHING) -> fleet_pb2.AnsweringEngine:
    """Return a copy of an engine with what is promised to it, less `own`."""
    copied = fleet_pb2.AnsweringEngine()
    copied.CopyFrom(engine)
    for name in ("requests", "blocks"):
        key = engine.engine_id, name
        setattr(copied.promised, name, min(MOST, promises[key] - own[key]))
    return copied
