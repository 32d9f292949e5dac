"""Answers questions about the engines of all replicas, from this replica's own data and the answers of the others.

The module owns the merging of the answers: an engine that moved between replicas appears once, as the replica with its
newest connection reports it. The module runs on the control plane's event loop.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from itertools import chain
from typing import TYPE_CHECKING

from meridian.v1 import fleet_pb2, policy_pb2

from meridian_control.common.errors import NotFound
from meridian_control.common.paging import MAX_PAGE_SIZE, fitting
from meridian_control.fleet.departed import Departed
from meridian_control.fleet.peers import CALL_TIMEOUT_S, local, pages
from meridian_control.fleet.views import engine_key, request_key, sums_view

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping

    from meridian_control.fleet.fleet import Fleet
    from meridian_control.fleet.peers import Peer, Peers
    from meridian_control.fleet.recording import Recording

CONNECTED = fleet_pb2.CONNECTION_STATE_CONNECTED
# Seconds after which the leader no longer uses what a replica has answered before, if it has asked nobody since.
FORGET_S = 10.0
# Seconds for which all watchers share one query of the fleet; largest number of bytes of its answer, unless the engines
# alone have more.
SHARED_S, WATCH_BYTES = 0.05, 16 << 20


class WholeFleet:
    """The engines of all replicas. `fleet` has this replica's engines. `peers` asks the other replicas, and is None if
    the store allows only one replica. `leads` returns whether this replica leads."""

    def __init__(self, fleet: Fleet, replica_id: str, peers: Peers | None, leads: Callable[[], bool]) -> None:
        self.fleet, self.replica_id, self.peers, self.leads = fleet, replica_id, peers, leads
        # The newest answers of the other replicas to the leader, by replica id, and the time at which it last asked.
        self._heard: dict[str, list[fleet_pb2.Engine]] = {}
        self._asked_at = 0.0
        # Engines of replicas that have ended, as those replicas last reported them to the leader.
        self._orphans = Departed()
        # The newest query of the fleet for watchers, and the time of its start on the event loop's clock.
        self._look: asyncio.Task[fleet_pb2.WatchFleetResponse] | None = None
        self._looked_at = 0.0

    # -------------------------------------------------------------------------------------------------------- questions

    async def local_engines(self) -> list[fleet_pb2.Engine]:
        """Return the engines that are connected to this replica, or were until recently."""
        engines = await self.fleet.views.engines_in_turns()
        for engine in engines:
            engine.replica = self.replica_id
        return engines

    async def engines(self, local_only: bool = False) -> tuple[list[fleet_pb2.Engine], list[str]]:
        """Return the engines of all replicas, and the ids of the replicas that did not answer."""
        if self.peers is None or local_only:
            return await self.local_engines(), []
        reported, unreachable = await self.peers.ask(_engines)
        return await self._with(reported), unreachable

    async def sums(self) -> fleet_pb2.Engine:
        """Return what all streams of this replica have counted since it began, also those that have ended."""
        return sums_view(await self.fleet.totals(), self.replica_id, self.fleet.began_at)

    async def engines_and_sums(self) -> tuple[list[fleet_pb2.Engine], list[fleet_pb2.Engine]]:
        """Return the engines of all replicas, and what each replica has counted since it began, as far as replicas
        answer; those of 0.3.0 say only their engines."""
        answers = {} if self.peers is None else (await self.peers.ask(_engines_and_sums))[0]
        engines = await self._with({name: list(answer.engines) for name, answer in answers.items()})
        return engines, [await self.sums(), *(answer.sums for answer in answers.values() if answer.HasField("sums"))]

    async def _with(self, engines_by_replica: Mapping[str, list[fleet_pb2.Engine]]) -> list[fleet_pb2.Engine]:
        """Return this replica's engines and those of the others. engines_by_replica: the other
        replicas' engines, by replica id."""
        return once([*await self.local_engines(), *chain.from_iterable(engines_by_replica.values())])

    async def requests(
        self, engine_id: str = "", local_only: bool = False
    ) -> tuple[list[fleet_pb2.LiveRequest], list[str]]:
        """Return the live requests of all engines or of one engine, and the ids of the replicas that did not answer."""
        if self.peers is None or local_only:
            return await self.fleet.views.requests_in_turns(engine_id), []
        state = await self.state(engine_id)
        return list(state.requests), list(state.unreachable_replicas)

    async def state(self, engine_id: str = "", local_only: bool = False) -> fleet_pb2.WatchFleetResponse:
        """Return all engines, and the live requests of all engines or of one engine."""
        if self.peers is None or local_only:
            engines = await self.local_engines()
            return fleet_pb2.WatchFleetResponse(
                engines=engines, requests=await self.fleet.views.requests_in_turns(engine_id)
            )
        # A replica with very many requests may be late with them, and its engines are shown nevertheless.
        (engines_by_replica, silent), (by_replica, late) = await asyncio.gather(
            self.peers.ask(_engines), self.peers.ask(lambda peer: _requests(peer, engine_id), "requests")
        )
        unreachable = sorted({*silent, *late})
        engines = await self._with(engines_by_replica)
        where = {(engine.engine_id, engine.replica) for engine in engines if engine.state == CONNECTED}
        by_replica[self.replica_id] = await self.fleet.views.requests_in_turns(engine_id)
        requests = [
            live for replica_id, lives in by_replica.items() for live in lives if (live.engine_id, replica_id) in where
        ]
        requests.sort(key=request_key)
        return fleet_pb2.WatchFleetResponse(engines=engines, requests=requests, unreachable_replicas=unreachable)

    async def watched(self) -> fleet_pb2.WatchFleetResponse:
        """Return all engines and live requests. Watchers that ask within SHARED_S share one message, and must not
        change the message."""
        now = asyncio.get_running_loop().time()
        if self._look is None or now - self._looked_at >= SHARED_S:
            self._look, self._looked_at = asyncio.create_task(self.bounded_state()), now
        return await asyncio.shield(self._look)

    async def bounded_state(self, local_only: bool = False) -> fleet_pb2.WatchFleetResponse:
        """Return all engines, and as many live requests as fit into a message."""
        return bounded(await self.state(local_only=local_only))

    async def explain(
        self, request: policy_pb2.ExplainPolicyRequest, unknown: NotFound
    ) -> policy_pb2.ExplainPolicyResponse:
        """Return the answer of another replica that knows the engine or request.

        `unknown` is the error with which this replica answered. Raises NotFound if no replica knows the engine or
        request.
        """
        asked, answers, unreachable = local(request), list[policy_pb2.ExplainPolicyResponse](), list[str]()
        if self.peers is not None:
            answers, unreachable = await self.peers.ask_who_knows(
                lambda peer: peer.policy.ExplainPolicy(asked, timeout=CALL_TIMEOUT_S)
            )
        if answers:
            return answers[0]
        raise NotFound(str(unknown), unreachable)

    @asynccontextmanager
    async def recording(self, engine_id: str, local_only: bool) -> AsyncIterator[Recording]:
        """Record an engine, or all engines, on this replica and on every other replica that can be reached."""
        recording = self.fleet.record(engine_id)
        relay = None
        try:
            if self.peers is not None and not local_only:
                began = asyncio.Event()
                relay = asyncio.create_task(self.peers.relay(recording, began))
                await began.wait()
            yield recording
        finally:
            self.fleet.recordings.discard(recording)
            if relay is not None:
                relay.cancel()
                with suppress(asyncio.CancelledError):
                    await relay

    # ------------------------------------------------------------------------------------------------- for the leader

    async def led_engines(self) -> list[fleet_pb2.Engine] | None:
        """Return all engines for the replica that leads, None if not every live replica has answered yet.

        A replica that no longer answers counts with its last answer. Once the replica is no longer live, its engines
        are engines without a stream until they connect to another replica, for as long as `Departed` keeps them. While
        no rollout is active, this method is called before one begins, and not each second, because each answer has all
        engines of a replica.
        """
        if self.peers is None:
            return await self.local_engines()
        loop = asyncio.get_running_loop()
        if loop.time() - self._asked_at > FORGET_S:
            self._heard, self._orphans = {}, Departed()
        reported, unreachable = await self.peers.ask_live(_engines)
        self._asked_at, now = loop.time(), self.fleet.clock()
        lease_s = self.fleet.policy.policy.fallback.lease_ms / 1000 if self.fleet.policy is not None else 0.0
        for ended in self._heard.keys() - reported.keys() - set(unreachable):
            for engine in self._heard[ended]:
                # Nobody has seen the streams of a replica end that has ended itself.
                engine.lost = engine.lost or engine.state == CONNECTED
                engine.state = fleet_pb2.CONNECTION_STATE_DISCONNECTED
                self._orphans.add_engine(engine, lease_s, now)
        self._orphans.forget(now)
        self._heard = {name: self._heard[name] for name in unreachable if name in self._heard} | reported
        if not self._heard.keys() >= set(unreachable):
            return None
        engines = await self._with(self._heard | {"": list(self._orphans.views(now))})
        for engine in engines:
            if engine.state == CONNECTED:
                self._orphans.remove(engine.engine_id)
        return engines


def once(engines: Iterable[fleet_pb2.Engine]) -> list[fleet_pb2.Engine]:
    """Return each engine once, as its newest connection reports it; as gone only if it is connected to no replica."""
    newest: dict[tuple[str, str], fleet_pb2.Engine] = {}
    connected: set[str] = set()
    for engine in sorted(engines, key=lambda e: e.connect_time.ToNanoseconds()):
        if engine.state == CONNECTED:
            connected.add(engine.engine_id)
        newest[engine.engine_id, engine.incarnation if engine.state == CONNECTED else ""] = engine
    shown = [e for e in newest.values() if e.state == CONNECTED or e.engine_id not in connected]
    return sorted(shown, key=engine_key)


def bounded(state: fleet_pb2.WatchFleetResponse) -> fleet_pb2.WatchFleetResponse:
    """Return the state without the requests that do not fit into a message of WATCH_BYTES; those with the most thinking
    tokens stay."""
    if state.ByteSize() <= WATCH_BYTES:
        return state
    requests = sorted(state.requests, key=lambda live: -live.think_tokens)
    del state.requests[:]
    fits = fitting(requests, max(0, WATCH_BYTES - state.ByteSize()))
    state.requests.extend(sorted(requests[:fits], key=request_key))
    state.requests_left_out = len(requests) - fits
    return state


async def _engines(peer: Peer) -> list[fleet_pb2.Engine]:
    return list((await engine_pages(peer)).engines)


async def _engines_and_sums(peer: Peer) -> fleet_pb2.ListEnginesResponse:
    return await engine_pages(peer, with_sums=True)


async def engine_pages(peer: Peer, with_sums: bool = False) -> fleet_pb2.ListEnginesResponse:
    """Return all pages of a replica's engines as one."""
    request = fleet_pb2.ListEnginesRequest(local_only=True, page_size=MAX_PAGE_SIZE, with_sums=with_sums)
    return await pages(peer.fleet.ListEngines, request, "engines")


async def _requests(peer: Peer, engine_id: str) -> list[fleet_pb2.LiveRequest]:
    """Return all pages of a replica's live requests."""
    request = fleet_pb2.ListRequestsRequest(engine_id=engine_id, local_only=True, page_size=MAX_PAGE_SIZE)
    return list((await pages(peer.fleet.ListRequests, request, "requests")).requests)
