"""Defines the errors of the control plane and their form in a gRPC status.

The module owns the exception classes and their mapping to status codes, and does not know which code raises an error.
The errors are plain values, usable on any thread; `abort_with` belongs to the event loop of the gRPC server.

The `code` of a class is the metric label and, in upper case, the reason in the google.rpc.ErrorInfo that every error
carries. Codes are stable, and a class without its own has that of its base. A BadRequest lists bad fields, a
PreconditionFailure names the state that forbids the call, and a RetryInfo says when a caller may retry.
"""
# ruff: noqa: N818 - each class is named after the condition that it reports, without the suffix Error

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NoReturn

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc import StatusCode
from grpc_status import rpc_status  # type: ignore[import-untyped]

DOMAIN = "meridian"

# gRPC sends error details in trailing metadata. Peers accept 8 KiB of trailing metadata by default, and
# percent-encoding may triple the length of the message.
MAX_MESSAGE_CHARS = 300
MAX_VIOLATIONS_BYTES = 3000


@dataclass(frozen=True)
class Violation:
    """One bad field: its dotted path, a message that says what its value must be, and the value as text, None if no
    value is to be shown."""

    path: str
    message: str
    value: str | None = None
    # File and line of the field, as compilers write them; empty if it comes from no file.
    where: str = ""

    @property
    def description(self) -> str:
        return self.message if self.value is None else f"{self.message}; got {self.value}"

    def __str__(self) -> str:
        return f"{self.where}{self.path} {self.description}"


class MeridianError(Exception):
    """Base class of every error that the control plane raises on purpose."""

    code: ClassVar[str] = "internal"
    status: ClassVar[StatusCode] = StatusCode.INTERNAL

    # Machine-readable facts for the ErrorInfo; type and subject of the failed precondition, None for none; and the
    # seconds after which to retry, None if a retry makes no sense.
    metadata: Mapping[str, str] = MappingProxyType({})
    precondition: tuple[str, str] | None = None
    retry_after_s: float | None = None

    def __init_subclass__(cls, code: str = "", status: StatusCode | None = None) -> None:
        cls.code, cls.status = code or cls.code, status or cls.status

    def violations(self) -> tuple[Violation, ...]:
        """Return the bad fields for the BadRequest."""
        return ()


class Unauthenticated(MeridianError, code="unauthenticated", status=StatusCode.UNAUTHENTICATED):
    """The caller has no valid credentials. The text of the error never contains any part of the credentials."""


class Expired(Unauthenticated):
    """The caller's credentials were valid for a time that is over."""


class PermissionDenied(MeridianError, code="permission_denied", status=StatusCode.PERMISSION_DENIED): ...


class HostOnly(PermissionDenied, code="host_only"):
    """Callers need not authenticate, so that only callers on the control plane's own host may call `method`."""

    # The flags of meridian-control, each of which lets callers on other hosts call the method.
    metadata = MappingProxyType({"flags": "--access --client-ca --insecure"})

    def __init__(self, method: str) -> None:
        super().__init__(
            f"{method.rpartition('.')[2]} is for callers on the control plane's own host (127.0.0.1, ::1 or a Unix "
            "socket). Start meridian-control with --access FILE or --client-ca FILE, either with --tls-cert and "
            "--tls-key, or on a trusted network with --insecure, to allow it from other hosts"
        )


class TooMany(MeridianError, code="too_many", status=StatusCode.RESOURCE_EXHAUSTED):
    """A call exceeds the limits of its caller, or of all callers together."""

    def __init__(self, message: str, retry_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_s


class MemoryExceeded(MeridianError, code="memory_exceeded", status=StatusCode.RESOURCE_EXHAUSTED):
    """What an agent reports would take more memory than the bounds of its stream, of its caller or of all allow."""


class InvalidRequest(MeridianError, code="invalid_request", status=StatusCode.INVALID_ARGUMENT):
    """A field of the request has an unusable value."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field} {message}")
        self.violation = Violation(field, message)

    @staticmethod
    def unknown_name(field: str, name: str, known: Iterable[str]) -> "InvalidRequest":
        return InvalidRequest(field, f'must be one of {", ".join(sorted(known))}; got "{name}"')

    def violations(self) -> tuple[Violation, ...]:
        return (self.violation,)


class BadReport(InvalidRequest):
    """An agent's message breaks the contract. Only the checks of what an agent sends raise this error, so that no error
    of our own code counts as the agent's fault. `field` is the kind of the message, empty where it is not known yet."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(field, message)
        self.args = (f"{field} {message}".strip(),)


class PolicyError(MeridianError, ValueError, code="policy_invalid", status=StatusCode.INVALID_ARGUMENT):
    """A policy does not fit the schema. The text of the error has one line for each bad field."""

    def __init__(self, violations: Iterable[Violation]) -> None:
        self._violations = tuple(violations)
        super().__init__("\n".join(map(str, self._violations)))

    def violations(self) -> tuple[Violation, ...]:
        return self._violations


class EtagMismatch(MeridianError, code="etag_mismatch", status=StatusCode.ABORTED):
    """The policy or the rollout has changed since the caller read it. `expected` is the caller's etag, and `actual` is
    the current etag."""

    precondition = "ETAG", "policy"

    def __init__(self, expected: str, actual: str, what: str = "the policy in force") -> None:
        super().__init__(f'etag is "{expected}", but {what} has the etag "{actual}"; read it again')
        self.expected, self.actual = expected, actual
        self.metadata = {"expected": expected, "actual": actual}


class NotFound(MeridianError, code="not_found", status=StatusCode.NOT_FOUND):
    """What a call names is not known. unreachable: ids of the replicas that did not answer but may know it."""

    def __init__(self, message: str, unreachable: Sequence[str] = ()) -> None:
        if unreachable:
            self.retry_after_s = 1.0
            message += f"; replicas that did not answer: {', '.join(unreachable)}"
        super().__init__(message)


class StoredPolicyUnreadable(MeridianError, code="stored_policy_unreadable", status=StatusCode.FAILED_PRECONDITION):
    """A stored policy revision does not fit this version's schema. A new revision can still be stored."""

    def __init__(self, revision: int, error: PolicyError) -> None:
        lines = "; ".join(map(str, error.violations()))
        super().__init__(f"stored policy revision {revision} does not fit this version's schema: {lines}")
        self.revision = revision
        self.metadata = {"revision": str(revision)}
        self.precondition = "SCHEMA", f"policy revision {revision}"


class RolloutActive(MeridianError, code="rollout_active", status=StatusCode.FAILED_PRECONDITION):
    """The policy cannot change while a rollout is running, paused or halted."""

    def __init__(self, rollout_id: int) -> None:
        super().__init__(f"rollout {rollout_id} is active: abort it, or wait until it ends")
        self.rollout_id = rollout_id
        self.metadata = {"rollout_id": str(rollout_id)}


class RolloutEnded(MeridianError, code="rollout_ended", status=StatusCode.FAILED_PRECONDITION):
    """A rollout in `state` cannot be paused, resumed or aborted. `what` is the requested action."""

    def __init__(self, rollout_id: int, state: str, what: str) -> None:
        super().__init__(f"rollout {rollout_id} is {state}: there is nothing to {what}")
        self.rollout_id = rollout_id
        self.metadata = {"rollout_id": str(rollout_id)}


class StoreUnavailable(MeridianError, code="store_unavailable", status=StatusCode.UNAVAILABLE):
    retry_after_s = 1.0


class NotLeading(MeridianError, code="not_leading", status=StatusCode.UNAVAILABLE):
    """A replica that no longer leads has attempted a write that only the leading replica may make."""


class ReplicaUnavailable(MeridianError, code="replica_unavailable", status=StatusCode.UNAVAILABLE):
    """A call needs other replicas, which did not answer. `why` says more, and may be empty."""

    retry_after_s = 1.0

    def __init__(self, replica_ids: Iterable[str], why: str = "") -> None:
        self.replica_ids = tuple(replica_ids)
        self.metadata = {"replicas": " ".join(self.replica_ids)}
        names = ", ".join(self.replica_ids)
        super().__init__(f"replicas that the call needs did not answer: {names}{f' ({why})' if why else ''}")


class RecordingTooSlow(MeridianError, code="recording_too_slow", status=StatusCode.RESOURCE_EXHAUSTED):
    """A client of RecordTrace has read its records more slowly than they were recorded."""

    def __init__(self, limit_bytes: int, limit_records: int) -> None:
        limits = f"{limit_bytes >> 20} MiB or {limit_records} records"
        super().__init__(
            f"the recording has ended, because more than {limits} waited for its client; records already sent are valid"
        )


def to_status(error: MeridianError) -> status_pb2.Status:
    """Return the google.rpc.Status of an error, with an ErrorInfo and the details that apply to the error."""
    info = error_details_pb2.ErrorInfo(reason=error.code.upper(), domain=DOMAIN)
    info.metadata.update({key: _shorten(value) for key, value in error.metadata.items()})
    details: list[Message] = [info]
    if violations := error.violations():
        details.append(error_details_pb2.BadRequest(field_violations=_field_violations(violations)))
    if precondition := error.precondition:
        failure = error_details_pb2.PreconditionFailure()
        failure.violations.add(type=precondition[0], subject=precondition[1], description=_shorten(str(error)))
        details.append(failure)
    if (retry_s := error.retry_after_s) is not None:
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
        # The caller has disconnected, so that no status can be sent and `abort` has not raised the AbortError that gRPC
        # expects. The next use of the context raises the AbortError.
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
