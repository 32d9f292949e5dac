"""Checks every call before it reaches a service: identifies the caller, checks role and limits, records the call.

The module owns the order of these checks. The interceptor parses every message, so that a message that cannot be parsed
counts as the caller's fault, and turns every failure into a status with details for the caller. The module knows no
service: audit records are made from the fields of requests and responses. The module runs on the event loop of the gRPC
server.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
from google.protobuf import text_format
from google.protobuf.message import DecodeError, Message

from meridian_control.common.errors import InvalidRequest, MeridianError, TooMany, abort_with
from meridian_control.server.audit_log import AuditLog, AuditOutcome, Call, before_etag
from meridian_control.server.client_faults import ClientFaults
from meridian_control.server.handshakes import Handshakes
from meridian_control.server.rate_limits import Kind, Limiter
from meridian_control.server.roles import (
    NOBODY,
    OPEN,
    Access,
    AccessRule,
    Demands,
    Principal,
    Role,
    caller,
    caller_host,
    demands,
    rule_of,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping

    from meridian_control.server.roles import Certificate, Metadata

    Handler = grpc.RpcMethodHandler[Any, Any]
    Context = grpc.aio.ServicerContext[Any, Any]

logger = logging.getLogger(__name__)

# Seconds between two checks of whether the callers of open streams may still make their calls.
RECHECK_S = 60.0
# Limits on the request of every call except an engine's stream.
MAX_REQUEST_BYTES = 1 << 20
MAX_TEXT_CHARS = 1000
MAX_DETAIL_CHARS = 200
# Size up to which a message in a request is shown in the audit log.
MAX_TEXT_BYTES = 4096
UNPARSEABLE = "cannot be parsed"
# Status codes of errors that the caller causes.
CALLERS_FAULTS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
# Request fields that have their own columns in an audit record.
_APART = {"author", "etag", "policy", "reason", "request_id"}


class Gate(grpc.aio.ServerInterceptor):
    """The interceptor of the gRPC server. A service method that streams responses must be an async generator, unless
    its rule is OPEN. A method that takes a stream and returns one response is not supported.

    parsers: by method, the functions that parse the messages of streams in place of the generated ones. They raise
    DecodeError or InvalidRequest.
    """

    def __init__(
        self,
        access: Access,
        limiter: Limiter,
        audit: AuditLog,
        faults: ClientFaults | None = None,
        *,
        parsers: Mapping[str, Callable[[bytes], Message]] | None = None,
    ) -> None:
        self.access, self.limiter, self.audit, self.parsers = access, limiter, audit, parsers or {}
        self.faults = faults or ClientFaults()
        self.handshakes = Handshakes()
        self._tasks: set[asyncio.Task[Any]] = set()
        # The streams that are being served.
        self.streams: set[_Gated] = set()

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Handler | None]], details: grpc.HandlerCallDetails
    ) -> Handler | None:
        handler = await continuation(details)
        rule = rule_of(details.method)
        if handler is None:
            return handler
        streams = handler.request_streaming, handler.response_streaming
        attribute = "_".join("stream" if is_stream else "unary" for is_stream in streams)
        gated = _Gated(self, rule, details.method.removeprefix("/"), handler, getattr(handler, attribute))
        behaviour: Any = gated.stream if handler.response_streaming else gated.single
        if rule is OPEN:
            behaviour = gated.open
        # Without a deserializer gRPC hands over bytes, so that nothing is parsed for a caller without permission.
        make: Callable[..., Handler] = getattr(grpc, f"{attribute}_rpc_method_handler")
        return make(behaviour, None, handler.response_serializer)

    async def keep_checking(self) -> None:
        """Check the callers of all streams again every RECHECK_S, until cancelled."""
        while True:
            await asyncio.sleep(RECHECK_S)
            await self.check_streams()

    async def check_streams(self) -> None:
        """End each stream whose caller may no longer make its call: the access file, or a key of tokens, has changed,
        or the caller's credentials have expired."""
        for gated in list(self.streams):
            if gated in self.streams:
                gated.check_again()
            await asyncio.sleep(0)

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start work that continues after its call has ended."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            # The call gets the exception if it still waits. Reading the exception keeps asyncio from logging it.
            task.exception()

    async def finish(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Wait for work that a cancelled call does not cancel."""
        return await asyncio.shield(self.start(work))

    async def settle(self) -> None:
        """Wait for the work that ended calls have left running."""
        await asyncio.gather(*self._tasks, return_exceptions=True)


class _Gated:
    """Serves one call: runs the checks, and calls `inner`, the service's handler, once the call has passed them."""

    def __init__(self, gate: Gate, rule: AccessRule, method: str, handler: Handler, inner: Any) -> None:
        self._gate, self._rule, self._method, self._handler, self._inner = gate, rule, method, handler, inner
        self._call = Call("", "", "", method)
        self._let_in = False
        # The caller's metadata, certificate and address, and what the service demands of the caller beside the role.
        self._shown: tuple[Metadata, Certificate, str] = ((), {}, "")
        self._demands = Demands()
        # The task that serves a stream, and whether the task waits for the service, and not for gRPC.
        self._task: asyncio.Task[Any] | None = None
        self._waits = True
        # The error with which the gate ends the stream.
        self._ended_by: MeridianError | None = None

    async def open(self, given: bytes, context: Context) -> Any:
        """Serve a call that every caller may make. The method returns its response, or writes its responses itself."""
        peer = _peer(context)
        self._gate.handshakes.called(peer)
        try:
            request, place = self._parsed(given), ExitStack()
            if self._handler.response_streaming:
                place = self._gate.limiter.place(Kind.OPEN_STREAM, host_of(peer))
        except MeridianError as error:
            await self._failed(error, context)
        with place:
            return await self._inner(request, context)

    async def single(self, given: bytes, context: Context) -> Any:
        try:
            with await self._admitted(context) as place:
                request = await self._request(given)
                if not self._rule.recorded:
                    return await self._inner(request, context)
                # The work goes on if the caller hangs up, and keeps the call's place.
                return await self._gate.finish(self._recorded(request, context, place.pop_all()))
        except Exception as error:
            await self._failed(error, context)

    async def _recorded(self, request: Message, context: Context, place: ExitStack) -> Any:
        """Record the call, serve it, add its outcome to the record, and free its place."""
        with place:
            record = await self._gate.audit.begin_call(self._call)
            before_etag.set(getattr(request, "etag", ""))
            outcome, details = AuditOutcome("CANCELLED"), None
            try:
                response = await self._inner(request, context)
                outcome = AuditOutcome("OK", after_etag=_etag(response))
                if enums := _enums(response):
                    details = self._call.details | enums
            except Exception as error:
                outcome = _outcome(error, context)
                raise
            finally:
                await self._gate.audit.end_call(record, replace(outcome, before_etag=before_etag.get()), details)
            return response

    async def stream(self, given: Any, context: Context) -> AsyncIterator[Any]:
        begun, outcome = None, AuditOutcome("CANCELLED")
        try:
            with await self._admitted(context), self._checked_again():
                request = self._requests(given) if self._handler.request_streaming else await self._request(given)
                if self._rule.recorded:
                    begun = self._gate.start(self._gate.audit.begin_call(self._call))
                    await asyncio.shield(begun)
                async with aclosing(self._inner(request, context)) as responses:
                    async for response in responses:
                        self._waits = False
                        yield response
                        self._waits = True
                        if self._ended_by is not None:
                            raise self._ended_by
            outcome = AuditOutcome("OK")
        except (Exception, asyncio.CancelledError, GeneratorExit) as raised:
            error = self._ended_by or raised
            if not isinstance(error, Exception):
                raise
            if isinstance(raised, asyncio.CancelledError) and self._task is not None:
                self._task.uncancel()
            outcome = _outcome(error, context)
            late = self._ended_by is not None or (self._kind() is Kind.ENGINE and self._let_in)
            if late and begun is None and outcome.code == "PERMISSION_DENIED":
                await self._gate.finish(self._gate.audit.refuse(self._call, outcome))
            if isinstance(raised, GeneratorExit):
                # The caller has not read for so long that gRPC's work was cancelled. After that its context gives no
                # address: the process would crash.
                self._note(error, self._call.peer)
                raise
            await self._failed(error, context)
        finally:
            if begun is not None:
                self._gate.start(self._ended(begun, outcome))

    @contextmanager
    def _checked_again(self) -> Iterator[None]:
        """Let the gate check the caller again until the context is left."""
        self._task = asyncio.current_task()
        demands.set(self._demands)
        self._gate.streams.add(self)
        try:
            yield
        finally:
            self._gate.streams.discard(self)
            # Timers and tasks that outlast the stream keep its context.
            self._demands.check = self._demands.at_end = None

    def check_again(self) -> None:
        """End the stream if its caller may no longer make the call."""
        try:
            principal = self._gate.access.identify(*self._shown, begun_before=True)
            principal.check(self._rule.role or Role.NONE, self._method)
            if self._demands.check is not None:
                self._demands.check(principal)
        except MeridianError as error:
            at_end, self._demands.at_end = self._demands.at_end, None
            if at_end is not None and at_end(error):
                return
            # If gRPC's work is cancelled, the caller gets no status; so the stream ends after the response, unless the
            # caller has not read that until the next check.
            at_once = self._waits or self._ended_by is not None
            self._ended_by = error
            if self._task is not None and at_once:
                self._task.cancel()

    async def _ended(self, begun: asyncio.Task[int], outcome: AuditOutcome) -> None:
        await self._gate.audit.end_call(await begun, outcome)

    async def _admitted(self, context: Context) -> ExitStack:
        """Identify the caller, check role and limits, and return the place of the call, to be closed at its end.

        Raises MeridianError.
        """
        gate, principal, peer = self._gate, NOBODY, _peer(context)
        gate.handshakes.called(peer)
        try:
            self._shown = context.invocation_metadata() or (), context.auth_context(), peer
            principal = gate.access.identify(*self._shown)
            principal.check(self._rule.role or Role.NONE, self._method)
            place = gate.limiter.place(self._kind(), principal.name or host_of(peer))
        except MeridianError as error:
            if self._rule.recorded or not isinstance(error, TooMany):
                await gate.finish(gate.audit.refuse(_call(principal, peer, self._method), _outcome(error, context)))
            raise
        caller.set(principal)
        caller_host.set(host_of(peer))
        self._call, self._let_in = _call(principal, peer, self._method), True
        return place

    def _kind(self) -> Kind:
        if self._rule.role is Role.AGENT:
            return Kind.ENGINE
        return Kind.STREAM if self._handler.response_streaming else Kind.CALL

    async def _request(self, given: bytes) -> Any:
        """Parse the request and set its author to the caller's name. Raises InvalidRequest."""
        try:
            request = self._parsed(given)
        except InvalidRequest as error:
            if self._rule.recorded:
                refused = AuditOutcome(error.status.name, str(error))
                await self._gate.finish(self._gate.audit.refuse(self._call, refused))
            raise
        if caller.get().name and "author" in request.DESCRIPTOR.fields_by_name:
            request.author = caller.get().name
        texts = {name: getattr(request, name, "") for name in ("request_id", "reason")}
        self._call = replace(self._call, **texts, details=_details(request))
        return request

    def _requests(self, given: AsyncIterator[bytes]) -> _Messages:
        parse: Any = self._gate.parsers.get(self._method, self._handler.request_deserializer)
        return _Messages(given, parse)

    def _parsed(self, given: bytes) -> Any:
        """Parse the request and check its size and text lengths. Raises InvalidRequest."""
        if len(given) > MAX_REQUEST_BYTES:
            raise InvalidRequest("message", f"must have at most {MAX_REQUEST_BYTES} bytes; got {len(given)}")
        parse: Any = self._handler.request_deserializer
        try:
            request = parse(given)
        except DecodeError:
            raise InvalidRequest("message", UNPARSEABLE) from None
        for field, value in request.ListFields():
            # A page token has the ids of an engine and of a request.
            if isinstance(value, str) and len(value) > MAX_TEXT_CHARS and field.name != "page_token":
                message = f"must have at most {MAX_TEXT_CHARS} characters; got {len(value)}"
                raise InvalidRequest(field.name, message)
        return request

    async def _failed(self, error: Exception, context: Context) -> NoReturn:
        """End the call with the status that its caller gets for `error`."""
        if isinstance(error, grpc.aio.AbortError):
            raise error
        self._note(error, context.peer())
        _let_go(error)
        await abort_with(context, error if isinstance(error, MeridianError) else MeridianError(_internal(error)))

    def _note(self, error: Exception, peer: str) -> None:
        """Log an error that ends the call, and count it if the caller causes it."""
        faults = self._gate.faults
        if not isinstance(error, MeridianError):
            # An internal error. A caller may be able to cause it repeatedly, so its log lines are rate-limited.
            if faults.may_log(host_of(peer), "internal"):
                logger.error("%s failed with an internal error", self._method, exc_info=error)
        elif error.status in CALLERS_FAULTS:
            level = logging.WARNING if self._kind() is Kind.ENGINE else logging.INFO
            faults.note(level, host_of(peer), error.code, f"{self._method} by {peer}: {error.code}: {_one_line(error)}")


class _Messages:
    """Iterates over the parsed messages of a stream. The class is no generator, because a generator would add a cost to
    every report of an engine."""

    def __init__(self, given: AsyncIterator[bytes], parse: Callable[[bytes], Message]) -> None:
        self._next, self._parse = aiter(given).__anext__, parse

    def __aiter__(self) -> _Messages:
        return self

    async def __anext__(self) -> Message:
        """Return the next message. Raises InvalidRequest if it cannot be parsed."""
        given = await self._next()
        try:
            return self._parse(given)
        except DecodeError:
            raise InvalidRequest("message", UNPARSEABLE) from None


def _let_go(error: BaseException) -> None:
    """Drop an exception's traceback, cause and context, which keep a call's messages and session alive.

    gRPC's own exception for a refused call has `error` as its context and is part of a reference cycle, so that the
    messages and the session would otherwise stay in memory until the garbage collector runs.
    """
    error.__traceback__ = error.__cause__ = error.__context__ = None


def _internal(error: Exception) -> str:
    """Return what a caller gets to know of an error of the control plane: no text, which may quote another caller."""
    return f"internal error of the control plane ({type(error).__name__}); its log has the traceback"


def _one_line(error: MeridianError) -> str:
    """Return the text and the notes of an error in one line of at most MAX_DETAIL_CHARS characters."""
    notes: list[str] = getattr(error, "__notes__", [])
    return " ".join("; ".join((str(error), *notes)).split())[:MAX_DETAIL_CHARS]


def _call(principal: Principal, peer: str, method: str) -> Call:
    return Call(principal.name, principal.role.name.lower(), peer, method)


def _peer(context: Context) -> str:
    """Return the caller's address. Raises CancelledError if the call has ended, before gRPC cancels it: the address is
    then unknown, and the caller would count as a stranger."""
    if not (peer := context.peer()):
        raise asyncio.CancelledError
    return peer


def host_of(peer: str) -> str:
    """Return a peer's address without the port: `ipv4:10.0.0.7` for `ipv4:10.0.0.7:41234`."""
    return peer.rpartition(":")[0]


def said_by(author: str = "", reason: str = "") -> str:
    """Return who makes a change, for the log: the author that the request names, or else the caller, the host, and the
    reason if there is one."""
    who = f"{author or caller.get().name or 'an unnamed caller'} at {caller_host.get()}"
    return f"{who}: {reason}" if reason else who


def _outcome(error: Exception, context: Context) -> AuditOutcome:
    if isinstance(error, grpc.aio.AbortError):
        return AuditOutcome(context.code().name, str(context.details()))
    if isinstance(error, MeridianError):
        return AuditOutcome(error.status.name, str(error))
    return AuditOutcome("INTERNAL", type(error).__name__)


def _details(request: Message) -> dict[str, str]:
    """Return the set fields of a request as text, without the policy and those that have columns of their own. A large
    field would take long, so its size stands for it."""
    details = {}
    for field, value in request.ListFields():
        if field.name in _APART or field.is_repeated:
            continue
        if field.message_type is None:
            text = str(value)
        elif (size := value.ByteSize()) > MAX_TEXT_BYTES:
            text = f"{size} bytes"
        else:
            text = text_format.MessageToString(value, as_one_line=True)
        details[field.name] = text if len(text) <= MAX_DETAIL_CHARS else text[: MAX_DETAIL_CHARS - 1] + "…"
    return details


def _enums(response: Message) -> dict[str, str]:
    """Return the set enum fields of a response by name, such as the state that EndThinking returns."""
    names: dict[str, str] = {}
    for field, value in response.ListFields():
        if (enum := field.enum_type) is not None and not field.is_repeated and value in enum.values_by_number:
            names[field.name] = enum.values_by_number[value].name
    return names


def _etag(response: Message) -> str:
    """Return the etag of the thing that a call has made, from the response or from a message in the response."""
    for message in (response, *(value for _, value in response.ListFields() if isinstance(value, Message))):
        if etag := getattr(message, "etag", ""):
            return str(etag)
    return ""
