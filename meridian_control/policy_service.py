"""PolicyService over the policy store.

Owns the order of checks and the hand-over of an accepted policy. Knows nothing of engines or of how a policy reaches
them. Runs on the event loop of the gRPC server.
"""

import asyncio
from collections.abc import Callable
from datetime import datetime
from typing import Any, TypeAlias

import grpc
from google.protobuf.timestamp_pb2 import Timestamp
from meridian.v1 import policy_pb2, policy_pb2_grpc

from meridian_control.errors import InvalidRequest, MeridianError, NotFound, abort_with
from meridian_control.policy import Policy, from_proto, to_proto
from meridian_control.store import PolicyStore, StoredRevision

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


class PolicyService(policy_pb2_grpc.PolicyServiceServicer):
    """The servicer.

    `clock` gives aware time. `on_change` is called on the event loop with each revision this service accepted, in
    order, before its caller has the answer; it must neither block nor raise.
    """

    def __init__(
        self, store: PolicyStore, clock: Callable[[], datetime], on_change: Callable[[StoredRevision], None]
    ) -> None:
        self._store = store
        self._clock = clock
        self._on_change = on_change
        self._one_at_a_time = asyncio.Lock()
        self._commits: set[asyncio.Task[StoredRevision]] = set()

    async def GetPolicy(  # noqa: N802
        self, request: policy_pb2.GetPolicyRequest, context: Context
    ) -> policy_pb2.GetPolicyResponse:
        try:
            stored = await self._store.current()
            if stored is None:
                raise NotFound("no policy is stored yet")
            return policy_pb2.GetPolicyResponse(revision=_to_message(stored))
        except MeridianError as error:
            await abort_with(context, error)

    async def UpdatePolicy(  # noqa: N802
        self, request: policy_pb2.UpdatePolicyRequest, context: Context
    ) -> policy_pb2.UpdatePolicyResponse:
        try:
            stored = await self._update(request)
            return policy_pb2.UpdatePolicyResponse(revision=_to_message(stored))
        except MeridianError as error:
            await abort_with(context, error)

    async def _update(self, request: policy_pb2.UpdatePolicyRequest) -> StoredRevision:
        if not request.HasField("policy"):
            raise InvalidRequest("policy", "must be set")
        policy = from_proto(request.policy)
        if request.validate_only:
            await self._store.check(request.etag)
            return StoredRevision(0, "", policy, request.author, request.reason, self._clock())
        # A caller that hangs up does not undo the commit, so it must not prevent on_change either.
        commit = asyncio.create_task(self._commit(policy, request))
        self._commits.add(commit)
        commit.add_done_callback(self._commits.discard)
        return await asyncio.shield(commit)

    async def _commit(self, policy: Policy, request: policy_pb2.UpdatePolicyRequest) -> StoredRevision:
        async with self._one_at_a_time:
            stored = await self._store.append(
                policy, etag=request.etag, author=request.author, reason=request.reason, now=self._clock()
            )
            self._on_change(stored)
            return stored


def _to_message(stored: StoredRevision) -> policy_pb2.PolicyRevision:
    create_time = Timestamp()
    create_time.FromDatetime(stored.created_at)
    return policy_pb2.PolicyRevision(
        revision=stored.revision,
        etag=stored.etag,
        policy=to_proto(stored.policy),
        author=stored.author,
        reason=stored.reason,
        create_time=create_time,
    )
