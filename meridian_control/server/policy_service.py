"""Implements PolicyService over the policy store.

The service owns the order of checks and hands each accepted policy over; it does not know how a policy reaches engines.
The interceptor in front of the service reports failures to callers, and completes a change even if its caller hangs up.
All methods run on the gRPC server's event loop.
"""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import datetime
from typing import Any, TypeAlias

import grpc
from meridian.v1 import policy_pb2, policy_pb2_grpc

from meridian_control.common.errors import InvalidRequest, NotFound
from meridian_control.common.paging import checked, newest_page
from meridian_control.common.plain_data import same
from meridian_control.policy.diff import Subject, diff, explain
from meridian_control.policy.formats import from_proto, to_proto
from meridian_control.policy.model import Policy, Who
from meridian_control.policy.shortening_kinds import warnings
from meridian_control.policy.store import PolicyStore, RevisionHeader, StoredRevision
from meridian_control.server.audit_log import before_etag
from meridian_control.server.interceptor import said_by
from meridian_control.storage.tables import MAX_REQUEST_ID_CHARS

logger = logging.getLogger(__name__)

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
Writing: TypeAlias = policy_pb2.UpdatePolicyRequest | policy_pb2.RollbackPolicyRequest
Elsewhere: TypeAlias = Callable[
    [policy_pb2.ExplainPolicyRequest, NotFound], Awaitable[policy_pb2.ExplainPolicyResponse]
]


class PolicyService(policy_pb2_grpc.PolicyServiceServicer):
    """The servicer.

    `clock` gives aware time. `on_change` is called with each revision that this service stored, before the caller gets
    the answer but perhaps after a newer one, and again if a request is repeated; `on_change` must neither block nor
    raise. `subject` finds an engine or a request of this replica by its id and raises NotFound; `elsewhere` asks the
    other replicas.
    """

    def __init__(
        self,
        store: PolicyStore,
        clock: Callable[[], datetime],
        on_change: Callable[[StoredRevision], None],
        subject: Callable[[str, str], Subject],
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self._store = store
        self._clock = clock
        self._on_change = on_change
        self._subject = subject
        self._elsewhere = elsewhere

    async def GetPolicy(  # noqa: N802
        self, request: policy_pb2.GetPolicyRequest, context: Context
    ) -> policy_pb2.GetPolicyResponse:
        return policy_pb2.GetPolicyResponse(revision=_to_message(await self._stored(request.revision)))

    async def UpdatePolicy(  # noqa: N802
        self, request: policy_pb2.UpdatePolicyRequest, context: Context
    ) -> policy_pb2.UpdatePolicyResponse:
        if not request.HasField("policy"):
            raise InvalidRequest("policy", "must be set")
        stored, changes = await self._put(from_proto(request.policy), request, request.reason)
        return policy_pb2.UpdatePolicyResponse(
            revision=_to_message(stored), changes=changes, warnings=warnings(stored.policy)
        )

    async def RollbackPolicy(  # noqa: N802
        self, request: policy_pb2.RollbackPolicyRequest, context: Context
    ) -> policy_pb2.RollbackPolicyResponse:
        if not request.revision:
            raise InvalidRequest("revision", "must be at least 1; got 0")
        wanted = await self._store.get(request.revision)
        reason = request.reason or f"rollback to revision {request.revision}"
        stored, changes = await self._put(wanted.policy, request, reason)
        return policy_pb2.RollbackPolicyResponse(
            revision=_to_message(stored), changes=changes, warnings=warnings(stored.policy)
        )

    async def ListRevisions(  # noqa: N802
        self, request: policy_pb2.ListRevisionsRequest, context: Context
    ) -> policy_pb2.ListRevisionsResponse:
        limit, before = checked(request.page_size, request.page_token)
        page, token = newest_page(await self._store.history(limit + 1, before), limit, lambda header: header.revision)
        return policy_pb2.ListRevisionsResponse(revisions=map(_header, page), next_page_token=token)

    async def DiffPolicies(  # noqa: N802
        self, request: policy_pb2.DiffPoliciesRequest, context: Context
    ) -> policy_pb2.DiffPoliciesResponse:
        after = await self._stored(request.after)
        number = request.before or after.revision - 1
        before = (await self._store.get(number)).policy if number else Policy()
        changes = diff(before, after.policy)
        return policy_pb2.DiffPoliciesResponse(before=number, after=after.revision, changes=changes)

    async def ExplainPolicy(  # noqa: N802
        self, request: policy_pb2.ExplainPolicyRequest, context: Context
    ) -> policy_pb2.ExplainPolicyResponse:
        subject = None
        if request.engine_id or request.request_id:
            try:
                subject = self._subject(request.engine_id, request.request_id)
            except NotFound as unknown:
                if request.local_only or self._elsewhere is None:
                    raise
                return await self._elsewhere(request, unknown)
        stored = await self._stored(request.revision or (subject.revision if subject else 0))
        values = explain(stored.policy, _subject(request, subject))
        return policy_pb2.ExplainPolicyResponse(revision=stored.revision, values=values)

    async def _stored(self, revision: int) -> StoredRevision:
        """Return a revision; 0 stands for the revision in force. Raises NotFound."""
        stored = await self._store.get(revision) if revision else await self._store.current()
        if stored is None:
            raise NotFound("no policy is stored yet")
        return stored

    async def _put(
        self, policy: Policy, request: Writing, reason: str
    ) -> tuple[StoredRevision, list[policy_pb2.PolicyChange]]:
        """Store a policy and return the revision and its changes; with validate_only, only make the checks."""
        check_texts(request)
        stored: StoredRevision | None
        if request.validate_only:
            await self._store.check_policy(policy)
            newest = 0
            if (stored := await self._store.answered(request.request_id, policy)) is None:
                newest = await self._store.check(request.etag)
                stored = StoredRevision(0, "", request.author, reason, self._clock(), policy)
            before = await self._store.readable(stored.revision - 1 if stored.revision else newest)
        else:
            stored, before = await self._store.append_and_compare(
                policy,
                etag=request.etag,
                author=request.author,
                reason=reason,
                now=self._clock(),
                request_id=request.request_id,
            )
            self._on_change(stored)
            logger.info("policy revision %d by %s", stored.revision, said_by(request.author, reason))
        if before is not None:
            before_etag.set(before.etag)
        return stored, diff(before.policy if before is not None else Policy(), policy)


def check_texts(request: Any) -> None:
    """Raise InvalidRequest if the author, the reason or the request id, if any, cannot be stored in a database."""
    for name in ("author", "reason", "request_id"):
        if "\0" in getattr(request, name, ""):
            raise InvalidRequest(name, "must not contain the character U+0000")
    if (length := len(getattr(request, "request_id", ""))) > MAX_REQUEST_ID_CHARS:
        raise InvalidRequest("request_id", f"must have at most {MAX_REQUEST_ID_CHARS} characters; got {length}")


def _subject(request: policy_pb2.ExplainPolicyRequest, live: Subject | None) -> Subject:
    """Return the subject of an explanation: the fields that the caller set, and for the rest the fields found."""
    who = live.who if live else Who()
    said = same(request, "model", "tenant", "slo_class", "effort")
    who = who._replace(**{name: value for name, value in said.items() if value})
    if request.engine_labels:
        who = who._replace(engine_labels=dict(request.engine_labels))
    if live is None:
        return Subject(who, who.model)
    # The caller may ask about another request, or about another revision than the one in force.
    is_in_force = who == live.who and request.revision in (0, live.revision)
    changed = live.changed if is_in_force else {}
    return replace(live, who=who, changed=changed)


def _to_message(stored: StoredRevision) -> policy_pb2.PolicyRevision:
    message = _header(stored)
    message.policy.CopyFrom(to_proto(stored.policy))
    return message


def _header(stored: RevisionHeader) -> policy_pb2.PolicyRevision:
    message = policy_pb2.PolicyRevision(**same(stored, "revision", "etag", "author", "reason"))
    message.create_time.FromDatetime(stored.created_at)
    return message
