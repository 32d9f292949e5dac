"""Gives each session the engines to which its requests may be handed over, and keeps what became of the handovers.

All code runs on the server's event loop.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from meridian_control.capabilities.handover import rule
from meridian_control.capabilities.handover.pool import HandoverPool
from meridian_control.capabilities.handover.results import RESULTS, Handovers
from meridian_control.capabilities.handover.stream import EngineHandovers
from meridian_control.common.metric_entry import counter
from meridian_control.common.paging import fitting
from meridian_control.fleet.part import FleetPart
from meridian_control.fleet.trace_records import part_record
from meridian_control.fleet.whole_fleet import engine_pages

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meridian.v1 import fleet_pb2

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
