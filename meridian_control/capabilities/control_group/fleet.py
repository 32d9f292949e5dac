"""Adds up what treated requests and the control group show, over all engines and replicas, and watches the harm.

The module runs on the control plane's event loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meridian.v1 import fleet_pb2

from meridian_control.capabilities.control_group import metrics, savings, shown
from meridian_control.capabilities.control_group.experiments import Experiments
from meridian_control.capabilities.control_group.going_on import drop
from meridian_control.capabilities.control_group.harm_guard import HarmGuard
from meridian_control.capabilities.control_group.stream import ControlGroup
from meridian_control.fleet.left_behind import LeftBehind
from meridian_control.fleet.part import FleetPart
from meridian_control.fleet.peers import CALL_TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping

    from meridian_control.engine.part import Stream
    from meridian_control.engine.session import Session
    from meridian_control.engine.totals import Totals
    from meridian_control.fleet.connection import Connection
    from meridian_control.fleet.fleet import Fleet
    from meridian_control.fleet.part import Beside, Metric, Shown
    from meridian_control.fleet.peers import Peer, Peers
    from meridian_control.policy.store import StoredRevision


class Comparisons(FleetPart):
    """The counts of one replica, in `experiments`, and their sums over all replicas.

    guard: withdraws a policy whose shortening does harm; None in a fleet without other replicas, as in tests.
    """

    failure = "the harm of shortened thinking is not watched"
    tick_s = 5.0

    def __init__(self, fleet: Fleet) -> None:
        self.fleet, self.experiments = fleet, Experiments()
        self._left = LeftBehind(fleet, lambda session: session.part(ControlGroup).left(), drop)
        self.guard: HarmGuard | None = None
        self._replica_id = ""
        self._peers: Peers | None = None
        # The rules, the closed treated requests and the time of the newest point.
        self._before = "", 0, 0.0

    def attach(self, beside: Beside) -> None:
        self._replica_id, self._peers = beside.replica_id, beside.peers
        self.guard = HarmGuard(self.counts, beside.leads, beside.rollouts, self.fleet.set_policy, beside.clock)

    @property
    def newest(self) -> fleet_pb2.GetSavingsResponse | None:
        """The newest look at the counts of all replicas; None while another replica leads."""
        return self.guard.newest if self.guard is not None else None

    async def tick(self) -> None:
        self._left.forget()
        if self.guard is not None:
            await self.guard.look()

    def stream(self, stream: Stream) -> ControlGroup:
        return ControlGroup(stream, self.experiments)

    def joined(self, connection: Connection) -> None:
        """Let the requests of the stream before count on."""
        connection.session.part(ControlGroup).expect(self._left.taken_by(connection))

    def left(self, connection: Connection, replaced: bool) -> None:
        self._left.left_by(connection, replaced)

    def policy_came(self, stored: StoredRevision) -> None:
        self.experiments.experiment_of(stored.revision, stored.policy)

    def calls(self) -> Mapping[str, Callable[[Any], Awaitable[Any]]]:
        return {"GetSavings": self.savings}

    async def savings(self, request: fleet_pb2.GetSavingsRequest) -> fleet_pb2.GetSavingsResponse:
        """Return the counts of all replicas, added up, with estimates; or those of this replica, without estimates."""
        if request.local_only:
            return self.local_counts()
        counts, unreachable = await self.counts()
        merged = savings.merged(counts.values())
        merged.unreachable_replicas.extend(unreachable)
        return merged

    def local_counts(self) -> fleet_pb2.GetSavingsResponse:
        """Return the counts of treated requests and of the control group on this replica, without estimates."""
        policy, evidence = self.fleet.policy, self.guard.evidence if self.guard is not None else {}
        answer = fleet_pb2.GetSavingsResponse(savings=savings.messages(self.experiments, policy))
        for row in answer.savings:
            savings.add_evidence(row, evidence.get(row.rules, fleet_pb2.Savings()))
        if (withdrawal := savings.withdrawn(policy)) is not None:
            answer.withdrawn_revision, answer.withdrawn_reason = withdrawal.revision, withdrawal.reason
            answer.withdrawn_cause = savings.cause_of(withdrawal)
        return answer

    async def counts(self) -> tuple[dict[str, fleet_pb2.GetSavingsResponse], list[str]]:
        """Return the counts of each replica by its id, and the ids of the replicas that did not answer."""
        mine = self.local_counts()

        async def ask(peer: Peer) -> fleet_pb2.GetSavingsResponse:
            answer = await peer.fleet.GetSavings(fleet_pb2.GetSavingsRequest(local_only=True), timeout=CALL_TIMEOUT_S)
            # Raises an error for counts of which no estimate can be made, so that they are left out of the sums.
            savings.merged([mine, answer])
            return answer

        others, unreachable = await self._peers.ask(ask) if self._peers is not None else ({}, [])
        return {self._replica_id: mine} | others, unreachable

    def show_engine(self, view: fleet_pb2.Engine, session: Session) -> None:
        """Fill in the verdicts, and for a connected engine that has a withdrawing revision why that was stored."""
        view.control_group.update(session.part(ControlGroup).verdicts)
        withdrawal = savings.withdrawn(self.fleet.policy)
        if withdrawal is not None and view.state == fleet_pb2.CONNECTION_STATE_CONNECTED:
            view.withdrawn = withdrawal.reason if view.revision == withdrawal.revision else ""

    def metrics(self, totals: Totals) -> Iterator[Metric]:
        is_withdrawn = savings.withdrawn(self.fleet.policy) is not None
        return metrics.values(self.experiments.total(), is_withdrawn, self.newest)

    async def show(self) -> Shown:
        return shown.entries(await self.savings(fleet_pb2.GetSavingsRequest()), self.fleet.policies)

    async def point(self) -> dict[str, float]:
        """Return saving and harm under the rules in force, and the thinking tokens that the requests since the point
        before saved per second, by the mean over all treated requests."""
        answer = await self.savings(fleet_pb2.GetSavingsRequest())
        row = next((row for row in answer.savings if row.in_force), fleet_pb2.Savings())
        (rules, requests, since_s), now_s = self._before, self.fleet.clock().timestamp()
        point = shown.point(row)
        # The counts of a replica that does not answer would be missing here, and too many in the next point.
        if answer.unreachable_replicas:
            return point
        # Those that wait for earlier ones come into the comparison many at a time.
        closed = row.treated.requests + row.treated.waiting_requests
        self._before = row.rules, closed, now_s
        # A replica that has ended has taken its counts with it.
        grows = now_s > since_s and closed >= requests
        if row.HasField("saved_tokens") and rules == row.rules and grows:
            point["saved_tokens_per_s"] = (closed - requests) * row.saved_tokens.value / (now_s - since_s)
        return point
