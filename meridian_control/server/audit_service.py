"""Implements AuditService, which lists audit records. All methods run on the gRPC server's event loop."""

from __future__ import annotations

from datetime import UTC
from typing import TYPE_CHECKING, Any

from grpc import StatusCode
from meridian.v1 import audit_pb2, audit_pb2_grpc

from meridian_control.common.errors import InvalidRequest
from meridian_control.common.paging import checked, newest_page
from meridian_control.server.audit_log import PACKAGE, full_name, wanted
from meridian_control.server.roles import RULES

if TYPE_CHECKING:
    from datetime import datetime

    import grpc
    from google.protobuf.timestamp_pb2 import Timestamp

    from meridian_control.server.audit_log import AuditLog

# Largest id of a record.
MAX_ID = 2**63 - 1


class AuditService(audit_pb2_grpc.AuditServiceServicer):
    def __init__(self, audit: AuditLog) -> None:
        self._audit = audit

    async def ListAudit(  # noqa: N802
        self, request: audit_pb2.ListAuditRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> audit_pb2.ListAuditResponse:
        limit, before = checked(request.page_size, request.page_token, MAX_ID)
        if request.outcome and request.outcome not in StatusCode.__members__:
            raise InvalidRequest.unknown_name("outcome", request.outcome, StatusCode.__members__)
        conditions = wanted(
            principal=request.principal,
            method=request.method,
            outcome=request.outcome,
            request_id=request.request_id,
            since=_time(request, "since"),
            until=_time(request, "until"),
        )
        records = await self._audit.list(limit + 1, before, conditions)
        # Another version may have recorded methods that this one does not know.
        if request.method and not records and not request.page_token and full_name(request.method) not in RULES:
            methods = (method.removeprefix(PACKAGE) for method in RULES if method.startswith(PACKAGE))
            raise InvalidRequest.unknown_name("method", request.method, methods)
        page, token = newest_page(records, limit, lambda record: record.id)
        return audit_pb2.ListAuditResponse(records=page, next_page_token=token)


def _time(request: audit_pb2.ListAuditRequest, name: str) -> datetime | None:
    if not request.HasField(name):  # type: ignore[arg-type]
        return None
    stamp: Timestamp = getattr(request, name)
    if not 0 <= stamp.seconds < 2**32 or not 0 <= stamp.nanos < 10**9:
        raise InvalidRequest(name, f"must be between 1970 and 2106; got {stamp.seconds} s {stamp.nanos} ns")
    return stamp.ToDatetime(tzinfo=UTC)
