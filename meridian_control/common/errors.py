"""Errors of the control plane, and how one reaches a gRPC client.

Owns the exception tree and its mapping to status codes. Knows nothing of who raises what. Plain values, usable on any
thread; `abort_with` belongs to the event loop of the gRPC server.

    MeridianError               INTERNAL             internal
    ├── Unauthenticated         UNAUTHENTICATED      unauthenticated
    ├── PermissionDenied        PERMISSION_DENIED    permission_denied
    │   └── HostOnly            PERMISSION_DENIED    host_only
    ├── TooMany                 RESOURCE_EXHAUSTED   too_many
    ├── InvalidRequest          INVALID_ARGUMENT     invalid_request
    ├── PolicyError             INVALID_ARGUMENT     policy_invalid
    ├── EtagMismatch            ABORTED              etag_mismatch
    ├── NotFound                NOT_FOUND            not_found
    ├── StoredPolicyUnreadable  FAILED_PRECONDITION  stored_policy_unreadable
    ├── RolloutActive           FAILED_PRECONDITION  rollout_active
    ├── RolloutEnded            FAILED_PRECONDITION  rollout_ended
    ├── StoreUnavailable        UNAVAILABLE          store_unavailable
    ├── NotLeading              UNAVAILABLE          not_leading
    └── RecordingTooSlow        RESOURCE_EXHAUSTED   recording_too_slow

The last column is `code`: the metric label, and in upper case the reason of the google.rpc.ErrorInfo that every error
carries. Codes are stable. Bad fields are listed in a BadRequest, a state that stands in the way is named in a
PreconditionFailure, and what may be tried again has a RetryInfo.
"""
# ruff: noqa: N818 - the names are the conditions

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status  # type: ignore[import-untyped]

DOMAIN = "meridian"

# Details travel in trailing metadata, of which peers accept 8 KiB by default; percent-encoding may triple the message.
MAX_MESSAGE_CHARS = 300
MAX_VIOLATIONS_BYTES = 3000


@dataclass(frozen=True)
class Violation:
    """One bad field: dotted path, what it must be, and the value it had as text (None where no value matters)."""

    path: str
    message: str
    value: str | None = None

    @property
    def description(self) -> str:
        return self.message if self.value is None else f"{self.message}; got {self.value}"

    def __str__(self) -> str:
        return f"{self.path} {self.description}"


class MeridianError(Exception):
    """Base of every error the control plane raises on purpose."""

    code: ClassVar[str] = "internal"
    status: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL

    def metadata(self) -> dict[str, str]:
        """Machine-readable facts for ErrorInfo."""
        return {}

    def violations(self) -> tuple[Violation, ...]:
        """Bad fields for BadRequest."""
        return ()

    def precondition(self) -> tuple[str, str] | None:
        """The obstacle, for PreconditionFailure: its type, and the thing it was asked of."""
        return None

    def retry_after_s(self) -> float | None:
        """When to try again, for RetryInfo."""
        return None


class Unauthenticated(MeridianError):
    """Nobody knows who calls. The text never holds any of what was shown."""

    code = "unauthenticated"
    status = grpc.StatusCode.UNAUTHENTICATED


class PermissionDenied(MeridianError):
    code = "permission_denied"
    status = grpc.StatusCode.PERMISSION_DENIED


class HostOnly(PermissionDenied):
    """Nobody is asked who they are, and `method` is then for callers on the control plane's own host only."""

    code = "host_only"
    flags = ("--access", "--client-ca", "--insecure")

    def __init__(self, method: str) -> None:
        super().__init__(
            f"{method.rpartition('.')[2]} is for callers on the control plane's own host (127.0.0.1, ::1 or a Unix "
            "socket), until meridian-control is started with --access FILE or --client-ca FILE, both with --tls-cert "
            "and --tls-key, or with --insecure where the network is trusted"
        )

    def metadata(self) -> dict[str, str]:
        """The flags of meridian-control, any of which lets others call."""
        return {"flags": " ".join(self.flags)}


class TooMany(MeridianError):
    """More than one caller, or all of them, may have."""

    code = "too_many"
    status = grpc.StatusCode.RESOURCE_EXHAUSTED

    def __init__(self, message: str, retry_s: float) -> None:
        super().__init__(message)
        self.retry_s = retry_s

    def retry_after_s(self) -> float:
        return self.retry_s


class InvalidRequest(MeridianError):
    """A field of the request itself is unusable."""

    code = "invalid_request"
    status = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field} {message}")
        self.violation = Violation(field, message)

    def violations(self) -> tuple[Violation, ...]:
        return (self.violation,)


class PolicyError(MeridianError, ValueError):
    """A policy that breaks the schema; lists every bad field, one per line of its text."""

    code = "policy_invalid"
    status = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, violations: Iterable[Violation]) -> None:
        self._violations = tuple(violations)
        super().__init__("\n".join(map(str, self._violations)))

    def violations(self) -> tuple[Violation, ...]:
        return self._violations


class EtagMismatch(MeridianError):
    """The policy changed since the caller read it. `expected` is the caller's etag, `actual` the current one."""

    code = "etag_mismatch"
    status = grpc.StatusCode.ABORTED

    def __init__(self, expected: str, actual: str, what: str = "the policy in force") -> None:
        super().__init__(f'etag is "{expected}" but {what} has "{actual}": read it again')
        self.expected = expected
        self.actual = actual

    def metadata(self) -> dict[str, str]:
        return {"expected": self.expected, "actual": self.actual}

    def precondition(self) -> tuple[str, str]:
        return "ETAG", "policy"


class NotFound(MeridianError):
    code = "not_found"
    status = grpc.StatusCode.NOT_FOUND


class StoredPolicyUnreadable(MeridianError):
    """A stored revision that this version's schema refuses. Appending a new one is still possible."""

    code = "stored_policy_unreadable"
    status = grpc.StatusCode.FAILED_PRECONDITION

    def __init__(self, revision: int, error: PolicyError) -> None:
        lines = "; ".join(map(str, error.violations()))
        super().__init__(f"stored policy revision {revision} does not fit this version's schema: {lines}")
        self.revision = revision

    def metadata(self) -> dict[str, str]:
        return {"revision": str(self.revision)}

    def precondition(self) -> tuple[str, str]:
        return "SCHEMA", f"policy revision {self.revision}"


class RolloutActive(MeridianError):
    """The policy cannot change while a rollout is running, paused or halted."""

    code = "rollout_active"
    status = grpc.StatusCode.FAILED_PRECONDITION

    def __init__(self, rollout_id: int) -> None:
        super().__init__(f"rollout {rollout_id} is active: abort it first, or let it end")
        self.rollout_id = rollout_id

    def metadata(self) -> dict[str, str]:
        return {"rollout_id": str(self.rollout_id)}


class RolloutEnded(MeridianError):
    """A rollout in `state` cannot be paused, resumed or aborted; `what` was asked for."""

    code = "rollout_ended"
    status = grpc.StatusCode.FAILED_PRECONDITION

    def __init__(self, rollout_id: int, state: str, what: str) -> None:
        super().__init__(f"rollout {rollout_id} is {state}: there is nothing to {what}")
        self.rollout_id = rollout_id

    def metadata(self) -> dict[str, str]:
        return {"rollout_id": str(self.rollout_id)}


class StoreUnavailable(MeridianError):
    code = "store_unavailable"
    status = grpc.StatusCode.UNAVAILABLE

    def retry_after_s(self) -> float:
        return 1.0


class NotLeading(MeridianError):
    """A write that belongs to the leading replica, made by one that leads no more."""

    code = "not_leading"
    status = grpc.StatusCode.UNAVAILABLE


class RecordingTooSlow(MeridianError):
    """A client of RecordTrace that took its records more slowly than they came."""

    code = "recording_too_slow"
    status = grpc.StatusCode.RESOURCE_EXHAUSTED

    def __init__(self, limit_bytes: int, limit_records: int) -> None:
        limits = f"{limit_bytes >> 20} MiB or {limit_records} records"
        super().__init__(f"the recording was ended: more than {limits} waited for its client; what it has is complete")


def to_status(error: MeridianError) -> status_pb2.Status:
    """The google.rpc.Status of an error: ErrorInfo always, and what else there is to say of it."""
    info = error_details_pb2.ErrorInfo(reason=error.code.upper(), domain=DOMAIN)
    info.metadata.update({key: _shorten(value) for key, value in error.metadata().items()})
    details: list[Message] = [info]
    if violations := error.violations():
        details.append(error_details_pb2.BadRequest(field_violations=_field_violations(violations)))
    if precondition := error.precondition():
        failure = error_details_pb2.PreconditionFailure()
        failure.violations.add(type=precondition[0], subject=precondition[1], description=_shorten(str(error)))
        details.append(failure)
    if (retry_s := error.retry_after_s()) is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(math.ceil(retry_s * 1000))
        details.append(retry)
    return status_pb2.Status(
        code=error.status.value[0], message=_shorten(str(error)), details=[_packed(detail) for detail in details]
    )


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], error: MeridianError) -> NoReturn:
    """End the RPC with the error's status and details."""
    status = rpc_status.to_status(to_status(error))
    try:
        await context.abort(status.code, status.details, status.trailing_metadata or ())
    except grpc.aio.InternalError:
        # The caller is gone, and nothing can be sent. gRPC expects the AbortError that `abort` did not come to raise;
        # whatever is asked of the context next raises it.
        await context.send_initial_metadata(())
    raise AssertionError("abort returned")


def _field_violations(violations: tuple[Violation, ...]) -> Iterator[error_details_pb2.BadRequest.FieldViolation]:
    size = 0
    for index, violation in enumerate(violations):
        size += len(str(violation).encode()) + 8
        if size > MAX_VIOLATIONS_BYTES:
            rest = f"{len(violations) - index} more not listed"
            yield error_details_pb2.BadRequest.FieldViolation(description=rest)
            return
        yield error_details_pb2.BadRequest.FieldViolation(field=violation.path, description=violation.description)


def _packed(detail: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE_CHARS else text[: MAX_MESSAGE_CHARS - 1] + "…"
