"""Gives each session the engines to which its requests may be handed over, and keeps what became of the handovers.

All code runs on the server's event loop.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from datetime import UTC, timedelta
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from meridian.v1 import fleet_pb2

from meridian_control.capabilities.handover import rule
from meridian_control.capabilities.handover.results import RESULTS, Handovers
from meridian_control.capabilities.handover.stream import EngineHandovers
from meridian_control.common.metric_entry import counter
from meridian_control.common.paging import fitting
from meridian_control.fleet.part import FleetPart
from meridian_control.fleet.trace_records import part_record
from meridian_control.fleet.whole_fleet import CONNECTED, engine_pages

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from datetime import datetime

    from meridian_control.engine.part import Stream
    from meridian_control.engine.session import Session
    from meridian_control.engine.totals import Totals
    from meridian_control.fleet.connection import Connection
    from meridian_control.fleet.fleet import Fleet
    from meridian_control.fleet.part import Beside, Metric
    from meridian_control.fleet.peers import Peers

ENTRIES = (
    counter(
        "meridian_handovers_total",
        ("result",),
        "Requests that were to be handed over, by result: handed_over, recomputed, finished_on_thinking_engine or "
        "client_gone.",
        "`recomputed`: the KV blocks cannot be read; look at the answering engines' logs. `client_gone` grows: the "
        "relay does not reach the answering engines.",
    ),
)
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
        streams = self._newest(sessions) if takers else []
        by_thinking, promises = defaultdict(Promises, map(_promised, streams)), Promises()
        for promised in by_thinking.values():
            promises.update(promised)
        engines = {engine.engine_id: _with(engine, promises) for engine in map(_answering, streams)}
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

    def _newest(self, sessions: Iterable[Session]) -> list[Session | fleet_pb2.Engine]:
        """Return each engine as its newest stream shows it, sorted by id. Another stream of an engine that has moved or
        restarted may still seem open."""
        streams: list[tuple[datetime, str, Session | fleet_pb2.Engine]] = [
            (session.connected_at, session.hello.engine_id, session) for session in sessions
        ]
        for _, engines in self._heard.values():
            streams += [(engine.connect_time.ToDatetime(UTC), engine.engine_id, engine) for engine in engines]
        newest = {engine_id: stream for _, engine_id, stream in sorted(streams, key=itemgetter(0))}
        return [newest[engine_id] for engine_id in sorted(newest)]


class FleetHandovers(FleetPart):
    """The handovers of one replica's engines. results: what became of them. pool: the engines of all replicas."""

    failure = "the answering engines cannot be shared"

    def __init__(self, fleet: Fleet) -> None:
        self.fleet, self.results, self.pool = fleet, Handovers(), HandoverPool()
        self._peers: Peers | None = None

    def attach(self, beside: Beside) -> None:
        self._peers = beside.peers

    async def tick(self) -> None:
        """Ask the other replicas, while the policy in force or the candidate of a rollout decides handovers, and give
        each session its answering engines."""
        if self._peers is not None and any(policy.disagg.enabled for policy in self.fleet.policies):
            answers, _ = await self._peers.ask(engine_pages)
            now = self.fleet.clock()
            self.pool.hear({name: list(answer.engines) for name, answer in answers.items()}, now)
            for continued in (continued for answer in answers.values() for continued in answer.continued):
                self.results.take_continuation(continued, now)
        self.share()

    def share(self) -> None:
        """Give each session the engines to which its requests may be handed over, if these engines have changed."""
        now, connections = self.fleet.clock(), self.fleet.connections
        self.results.expire(now)
        by_session = {id(connection.session): connection for connection in connections}
        for session, engines in self.pool.changed(connections.sessions, now):
            connection = by_session[id(session)]
            connection.when_free(partial(self._give, connection, engines))

    def _give(self, connection: Connection, engines: list[fleet_pb2.AnsweringEngine]) -> None:
        handovers = connection.session.part(EngineHandovers)
        handovers.pool = tuple(engines)
        if connection.recordings:
            connection.note(part_record, self.fleet.clock(), handovers.record())

    # ----------------------------------------------------------------------------------------------------- the engines

    def stream(self, stream: Stream) -> EngineHandovers:
        return EngineHandovers(stream, self.results)

    def forgot(self, engine_ids: list[str]) -> None:
        self.results.forget(engine_ids)

    def froze(self) -> None:
        """A frozen engine takes no handovers."""
        self.share()

    # ----------------------------------------------------------------------------------------- messages, page, metrics

    def show_engine(self, view: fleet_pb2.Engine, session: Session) -> None:
        handovers, hello, policy = session.part(EngineHandovers), session.hello, session.policy
        pool = policy.disagg.pool_of(hello.labels) if policy is not None else ""
        if hello.url or pool not in ("", "thinking"):
            view.answering_engine.CopyFrom(handovers.answering_engine())
        if policy is not None and pool:
            view.pool = pool
            if pool != "answering":
                view.no_hand_over = handovers.no_hand_over(policy.disagg)
            if pool != "thinking":
                no_fabric = rule.no_fabric(policy.disagg, hello.kv_connector)
                view.answering_engine.unfit = view.answering_engine.unfit or no_fabric
        for answering, promised in handovers.promised().items():
            view.promised[answering].CopyFrom(promised)
        view.handovers.update(handovers.results.results.get(hello.engine_id, {}))
        if handovers.shadowed.requests:
            view.shadow_handovers.CopyFrom(handovers.shadowed)

    def answer_replica(self, answer: fleet_pb2.ListEnginesResponse, most_bytes: int) -> None:
        continued = self.results.continued()
        answer.continued.extend(continued[: fitting(continued, most_bytes)])

    def metrics(self, totals: Totals) -> Iterator[Metric]:
        results = {**dict.fromkeys(RESULTS, 0), **self.results.total()}
        yield "meridian_handovers_total", [((result,), count) for result, count in results.items()]

    def show_row(self, engine: fleet_pb2.Engine) -> dict[str, Any]:
        return {"handovers": handovers_text(engine)}


def _answering(stream: Session | fleet_pb2.Engine) -> fleet_pb2.AnsweringEngine:
    if isinstance(stream, fleet_pb2.Engine):
        return stream.answering_engine
    return stream.part(EngineHandovers).answering_engine()


def _promised(stream: Session | fleet_pb2.Engine) -> tuple[str, Promises]:
    """Return the id of a thinking engine, and what it has promised."""
    if isinstance(stream, fleet_pb2.Engine):
        return stream.engine_id, _sums(stream.promised)
    return stream.hello.engine_id, _sums(stream.part(EngineHandovers).promised())


def _sums(promised: Mapping[str, fleet_pb2.PromisedRequests]) -> Promises:
    """promised: by the answering engine's id."""
    requests = {(engine_id, "requests"): each.requests for engine_id, each in promised.items()}
    return Promises(requests | {(engine_id, "blocks"): each.blocks for engine_id, each in promised.items()})


def handovers_text(engine: fleet_pb2.Engine) -> str:
    """Return the engine's pool, why the engine has no part in handovers, and what became of its requests; empty for an
    engine without a pool."""
    if not engine.pool:
        return ""
    counted = [f"{name.replace('_', ' ')} {count}" for name, count in sorted(engine.handovers.items())]
    if engine.HasField("shadow_handovers"):
        counted.append(f"in shadow {engine.shadow_handovers.requests}")
    refusals = list(filter(None, (engine.no_hand_over, engine.answering_engine.unfit)))
    where = "both pools" if engine.pool == "both" else f"{engine.pool} pool"
    return f"{where}: {', '.join([*refusals, *counted]) or 'none yet'}"


def _with(engine: fleet_pb2.AnsweringEngine, promises: Promises, own: Promises = NOTHING) -> fleet_pb2.AnsweringEngine:
    """Return a copy of an engine with what is promised to it, less `own`."""
    copied = fleet_pb2.AnsweringEngine()
    copied.CopyFrom(engine)
    for name in ("requests", "blocks"):
        key = engine.engine_id, name
        setattr(copied.promised, name, min(MOST, promises[key] - own[key]))
    return copied
