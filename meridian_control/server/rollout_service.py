"""Implements RolloutService: checks requests, changes rollouts in the store, and has the fleet take up the change.

The service knows neither engines nor the rules by which a rollout proceeds. All methods run on the gRPC server's event
loop.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, TypeAlias

from meridian.v1 import fleet_pb2, rollout_pb2, rollout_pb2_grpc

from meridian_control.common.errors import EtagMismatch, InvalidRequest, NotFound
from meridian_control.common.paging import checked, newest_page
from meridian_control.policy.diff import diff
from meridian_control.policy.formats import from_proto, from_proto_as
from meridian_control.policy.shortening_kinds import warnings
from meridian_control.rollout import transitions as rules
from meridian_control.rollout.plan import Plan
from meridian_control.rollout.state import By, Rollout
from meridian_control.server.audit_log import before_etag
from meridian_control.server.interceptor import said_by
from meridian_control.server.policy_service import check_texts

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import grpc

    from meridian_control.rollout.driver import Rollouts

    Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

logger = logging.getLogger(__name__)

Steering: TypeAlias = (
    rollout_pb2.PauseRolloutRequest | rollout_pb2.ResumeRolloutRequest | rollout_pb2.AbortRolloutRequest
)


class RolloutService(rollout_pb2_grpc.RolloutServiceServicer):
    """The servicer. `engines` returns the engines of all replicas, and the ids of silent replicas.

    If a caller hangs up, a stored change stays, and the fleet gets the change from `Rollouts.follow` or the next tick.
    """

    def __init__(
        self,
        rollouts: Rollouts,
        engines: Callable[[], Awaitable[tuple[list[fleet_pb2.Engine], list[str]]]],
    ) -> None:
        self._rollouts, self._store, self._engines = rollouts, rollouts.store, engines

    async def StartRollout(  # noqa: N802
        self, request: rollout_pb2.StartRolloutRequest, context: Context
    ) -> rollout_pb2.StartRolloutResponse:
        for name in ("policy", "plan"):
            if not request.HasField(name):
                raise InvalidRequest(name, "must be set")
        policy, plan = from_proto(request.policy), from_proto_as(Plan, request.plan)
        check_texts(request)
        by = By(self._rollouts.clock(), request.author, request.reason, request.request_id)
        before = None
        if (rollout := await self._store.answered(request.request_id, plan, policy)) is None:
            if request.validate_only:
                rollout = rules.begin(
                    0, plan, (await self._store.policies.check(request.etag), 0), by, plan.harm_limit(policy)
                )
            else:
                rollout, before = await self._store.start(plan, policy, request.etag, by)
                who = said_by(request.author, request.reason)
                logger.info("rollout %d is started by %s", rollout.rollout_id, who)
                await self._rollouts.take_up()
        if before is None:
            before = await self._store.policies.get(rollout.stable_revision)
        before_etag.set(before.etag)
        return rollout_pb2.StartRolloutResponse(
            rollout=rollout.message(),
            changes=diff(before.policy, policy),
            warnings=[*await self._warnings(rollout), *warnings(policy)],
        )

    async def _warnings(self, rollout: Rollout) -> list[str]:
        """Return what the author should know about the rollout's steps. A rollout without an id is seen as the next
        one, because the engines of a step depend on the id."""
        if not rollout.rollout_id:
            newest = await self._store.newest()
            rollout = rollout.model_copy(update={"rollout_id": newest.rollout_id + 1 if newest is not None else 1})
        engines, _ = await self._engines()
        live = [e for e in engines if e.state == fleet_pb2.CONNECTION_STATE_CONNECTED]
        return rules.warnings(rollout, [(engine.engine_id, engine.labels) for engine in live])

    async def GetRollout(  # noqa: N802
        self, request: rollout_pb2.GetRolloutRequest, context: Context
    ) -> rollout_pb2.GetRolloutResponse:
        return rollout_pb2.GetRolloutResponse(rollout=(await self._store.get(request.rollout_id)).message())

    async def ListRollouts(  # noqa: N802
        self, request: rollout_pb2.ListRolloutsRequest, context: Context
    ) -> rollout_pb2.ListRolloutsResponse:
        limit, before = checked(request.page_size, request.page_token)
        page, token = newest_page(await self._store.history(limit + 1, before), limit, lambda one: one.rollout_id)
        return rollout_pb2.ListRolloutsResponse(rollouts=[r.message() for r in page], next_page_token=token)

    async def PauseRollout(  # noqa: N802
        self, request: rollout_pb2.PauseRolloutRequest, context: Context
    ) -> rollout_pb2.PauseRolloutResponse:
        return rollout_pb2.PauseRolloutResponse(rollout=await self._steer(request, rules.pause))

    async def ResumeRollout(  # noqa: N802
        self, request: rollout_pb2.ResumeRolloutRequest, context: Context
    ) -> rollout_pb2.ResumeRolloutResponse:
        return rollout_pb2.ResumeRolloutResponse(rollout=await self._steer(request, rules.resume))

    async def AbortRollout(  # noqa: N802
        self, request: rollout_pb2.AbortRolloutRequest, context: Context
    ) -> rollout_pb2.AbortRolloutResponse:
        return rollout_pb2.AbortRolloutResponse(rollout=await self._steer(request, rules.abort))

    async def _steer(self, request: Steering, change: Callable[[Rollout, By], Rollout]) -> rollout_pb2.Rollout:
        check_texts(request)
        by = By(self._rollouts.clock(), request.author, request.reason, request.request_id)

        def steered(rollout: Rollout) -> Rollout:
            changed = change(rollout, by)
            if changed is not rollout and request.etag not in ("", rollout.etag):
                raise EtagMismatch(request.etag, rollout.etag, f"rollout {rollout.rollout_id}")
            return changed

        stored = await self._store.get(request.rollout_id)
        if not request.rollout_id and not stored.active and not rules.knows(stored, by):
            raise NotFound("no rollout is active")
        before_etag.set(stored.etag)
        saved = await self._store.change(stored, steered)
        if saved.changes != stored.changes:
            who = said_by(request.author, request.reason)
            logger.info("rollout %d is %s by %s", saved.rollout_id, saved.events[-1].event, who)
        await self._rollouts.take_up()
        return saved.message()
