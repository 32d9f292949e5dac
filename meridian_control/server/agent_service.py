"""Implements AgentService: each agent holds one call of Connect. All methods run on the gRPC server's event loop.

The module also parses the messages of agents, unless a message makes more work than any engine needs: protobuf parses a
message in one piece, and all other engines wait meanwhile. Requests make up nearly all of a large message of an agent,
so their number is bounded, and so are the bytes of everything else.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from meridian.v1 import agent_pb2, agent_pb2_grpc, fleet_pb2

from meridian_control.common.errors import Expired, InvalidRequest, MeridianError
from meridian_control.common.message_bounds import SMALL_BYTES, fields
from meridian_control.common.opened_request import MAX_SLOTS
from meridian_control.server.client_faults import CONNECTIONS, ClientFaults
from meridian_control.server.interceptor import host_of
from meridian_control.server.rate_limits import Rate
from meridian_control.server.roles import caller, demand

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    import grpc

    from meridian_control.engine.session import Session
    from meridian_control.fleet.connection import Connection
    from meridian_control.fleet.fleet import Fleet

    Context = grpc.aio.ServicerContext[Any, Any]

logger = logging.getLogger(__name__)

CONNECT_METHOD = "meridian.v1.AgentService/Connect"
# Snapshots that a stream may send: per second in the long run, and at once. Further ones wait.
SNAPSHOTS = (1.0, 4)
# Seconds after which a message counts as one that took long.
SLICE_S = 0.002
# Seconds within which an agent must send its Hello on a new stream.
HELLO_S = 10.0
# Seconds within which an engine whose stream broke off has a new stream, unless it is lost.
BACK_S = 3.0
# Seconds within which gRPC cancels a call whose connection is broken; less than an agent waits for its stream's end.
BREAKS_S = 0.2
# Seconds within which an agent that is sent away must end its side of the stream; and the least and the most seconds
# after which every agent is sent away, before gRPC ends its connection for its age and what is under way is lost.
LEAVES_S = 3.0
LASTS_S = 20 * 3600.0, 21 * 3600.0
# Seconds over which agents are sent away whose credentials have expired together, as after a deploy; less than between
# two checks of callers, the second of which ends a stream.
SPREAD_S = 45.0
# Seconds between two looks for engines whose streams broke off.
LOOK_S = 1.0
EPOCH = datetime.fromtimestamp(0, UTC)
# Largest number of bytes of an entry, which has a few texts and numbers; and of what a message has beside entries. An
# agent's reports have at most REPORT_BYTES with their entries, and any other message is smaller.
ENTRY_BYTES, REPORT_BYTES, OTHER_BYTES = 64 << 10, 1 << 20, 256 << 10
# Largest number of tags in a message, beside entries.
MAX_TAGS = 4096
# Fields of a message whose entries are counted.
COUNTED = {"snapshot": ("requests", "ended"), "step": ("opened", "closed", "outcomes")}
# Columns of a report that have one row for a request.
COLUMNS = ("probes", "loops", "continued", "joined", "preemptions")


class AgentService(agent_pb2_grpc.AgentServiceServicer):
    """The servicer. `refresh` brings the newest state of the store to the fleet; `Fleet.join` may call it. `engines`
    returns the engines of all replicas, and the ids of the replicas that did not answer. `seat` takes a place among all
    engines, and raises TooMany."""

    def __init__(
        self,
        fleet: Fleet,
        faults: ClientFaults,
        refresh: Callable[[], Awaitable[None]],
        engines: Callable[[], Awaitable[tuple[list[fleet_pb2.Engine], list[str]]]],
        seat: Callable[[], ExitStack],
    ) -> None:
        self._fleet, self._faults, self._refresh, self._engines = fleet, faults, refresh, engines
        self._seat = seat
        # Engines whose streams broke off, as (id, incarnation), with the time and the host; a task looks for them.
        self._broken_off: dict[tuple[str, str], tuple[datetime, str]] = {}
        self._looking: asyncio.Task[None] | None = None

    async def Connect(  # noqa: N802
        self, request_iterator: AsyncIterator[agent_pb2.ConnectRequest], context: Context
    ) -> AsyncIterator[agent_pb2.ConnectResponse]:
        who = caller.get().name or host_of(context.peer())
        try:
            first = await _first(request_iterator)
            if first is None or first.WhichOneof("message") != "hello":
                raise InvalidRequest("message", "must begin with hello")
            engine_id = first.hello.engine_id
            caller.get().check_engine(engine_id)
            connection, place = self._join(first.hello, who)
        except MeridianError as error:
            self._fleet.count_end(error.code)
            raise
        demand(lambda principal: principal.check_engine(engine_id), partial(self._losing, connection))
        reader = asyncio.create_task(self._read(connection, request_iterator))
        # Callers choose engine ids, so their number is unbounded and the log lines are rate-limited.
        host = host_of(context.peer())
        may_log = self._faults.may_log(host, "connections", CONNECTIONS)
        if may_log:
            self._log_connected(connection.session)
        reason = "agent_closed"
        ages = _later(random.uniform(*LASTS_S), self._fleet.send_away, connection, "the stream is old")
        try:
            while (response := await connection.outgoing.get()) is not None:
                yield response
                _end_if_away(connection, response)
                if connection.overflowed and connection.outgoing.empty():
                    # Responses were left out, so the agent must come back with a snapshot.
                    break
            failed = (reader.exception() if reader.done() else None) or connection.failure
            if failed is not None:
                reason = failed.code if isinstance(failed, MeridianError) else MeridianError.code
                raise failed
            reason = connection.closing or ("overflow" if connection.overflowed else "agent_closed")
            if reason == "agent_closed":
                # The agent's side ends also if the connection breaks; gRPC cancels the call soon after that.
                await asyncio.sleep(BREAKS_S)
        except (asyncio.CancelledError, GeneratorExit):
            # An agent of an earlier version that is sent away may leave before gRPC's work on the GoingAway is over.
            left = "agent_closed" if connection.session.shuts_down else "disconnected"
            reason = connection.closing or left
            raise
        finally:
            ages.cancel()
            reader.cancel()
            place.close()
            self._fleet.leave(connection, reason)
            if may_log:
                logger.info("engine %s left: %s", engine_id, reason)
            if reason == "disconnected":
                self._broken_off[connection.session.identity] = self._fleet.clock(), host
                if self._looking is None or self._looking.done():
                    self._looking = asyncio.create_task(self._look_for_lost())

    def _losing(self, connection: Connection, error: MeridianError) -> bool:
        """Take in the error with which the gate is about to end a stream; return whether the agent is sent away
        instead. An agent whose credentials have expired comes back with what its files have by then, and that is no
        failure of either side."""
        if isinstance(error, Expired):
            _later(random.uniform(0, SPREAD_S), self._fleet.send_away, connection, str(error))
            return True
        connection.closing = error.code
        return False

    def _join(self, hello: agent_pb2.Hello, who: str) -> tuple[Connection, ExitStack]:
        """Begin a session; return its connection, and its place among the engines, which the caller closes. Raises as
        `Fleet.join`, and TooMany if there is no place."""
        place = self._seat()
        try:
            return self._fleet.join(hello, self._refresh, who), place
        except BaseException:
            place.close()
            raise

    def _log_connected(self, session: Session) -> None:
        engine_id, incarnation = session.identity
        logger.info("engine %s connected (%s)", engine_id, incarnation)
        if other := self._fleet.connections.namesake(session):
            logger.warning(
                "engine %s (%s) has the name of an engine that is still connected (%s): if both run, give each a "
                "MERIDIAN_ENGINE_ID of its own",
                engine_id,
                incarnation,
                other,
            )

    async def _look_for_lost(self) -> None:
        """Log which of the engines whose streams broke off have no new stream to any replica after BACK_S seconds."""
        while self._broken_off:
            await asyncio.sleep(LOOK_S)
            now = self._fleet.clock()
            due = {k: v for k, v in self._broken_off.items() if abs((now - v[0]).total_seconds()) >= BACK_S}
            self._broken_off = {k: v for k, v in self._broken_off.items() if k not in due}
            # A list of all engines takes long, and most streams come back to their replica.
            if not (due := {k: v for k, v in due.items() if not self._is_back_here(k, v[0])}):
                continue
            engines, _ = await self._engines()
            live = [engine for engine in engines if engine.state == fleet_pb2.CONNECTION_STATE_CONNECTED]
            same = {(engine.engine_id, engine.incarnation) for engine in live}
            began = {engine.engine_id: engine.connect_time.ToDatetime(UTC) for engine in sorted(live, key=_connected)}
            for (engine_id, incarnation), (left, host) in due.items():
                # An older stream under the same id belongs to another engine.
                came_back = (engine_id, incarnation) in same or began.get(engine_id, EPOCH) >= left
                if not came_back and self._faults.may_log(host, "lost", CONNECTIONS):
                    logger.warning(
                        "engine %s (%s) is lost: its stream broke off, and it has not come back within %g s",
                        engine_id,
                        incarnation,
                        BACK_S,
                    )

    def _is_back_here(self, identity: tuple[str, str], left: datetime) -> bool:
        streams = [connection.session for connection in self._fleet.connections.of_engine(identity[0])]
        return any(session.identity == identity or session.connected_at >= left for session in streams)

    async def _read(self, connection: Connection, requests: AsyncIterator[agent_pb2.ConnectRequest]) -> None:
        clock, turns, who = time.perf_counter, self._fleet.turns, connection.who
        snapshots = Rate(*SNAPSHOTS, time.monotonic())
        try:
            async for request in requests:
                if request.HasField("snapshot") and not request.snapshot.continues:
                    while wait_s := snapshots.wait_s(time.monotonic()):
                        await asyncio.sleep(wait_s)
                if connection.busy:
                    await connection.free(turns)
                began_s = clock()
                for _ in self._fleet.receiving(connection, request):
                    await turns.next(who)
                # A message may have megabytes, and the next one may be long in coming.
                del request
                if connection.overflowed:
                    return
                if clock() - began_s > SLICE_S:
                    # Who takes long must not take in the next message before the others have had their turns.
                    await turns.next(who)
        except Exception as error:
            error.add_note(f"engine {connection.session.hello.engine_id}")
            raise
        finally:
            await connection.outgoing.put(None)


def _later(seconds: float, call: Callable[..., object], *args: object) -> asyncio.TimerHandle:
    return asyncio.get_running_loop().call_later(seconds, call, *args)


def _end_if_away(connection: Connection, response: agent_pb2.ConnectResponse) -> None:
    """End a stream LEAVES_S seconds after the agent was asked to leave it, unless the agent ends it before."""
    if response.HasField("going_away"):
        _later(LEAVES_S, connection.put, [None])


def _connected(engine: fleet_pb2.Engine) -> int:
    return engine.connect_time.ToNanoseconds()


async def _first(requests: AsyncIterator[agent_pb2.ConnectRequest]) -> agent_pb2.ConnectRequest | None:
    """Return the first message of a stream, None if the stream ends or HELLO_S pass without one.

    The timeout keeps a silent caller from occupying the place of an engine.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(HELLO_S):
            return await anext(aiter(requests), None)
    return None


def _numbers() -> dict[int, tuple[str, dict[int, str]]]:
    """Return the names of COUNTED by their field numbers."""
    numbers = {}
    for part, names in COUNTED.items():
        field: Any = agent_pb2.ConnectRequest.DESCRIPTOR.fields_by_name[part]
        inner = field.message_type.fields_by_name
        numbers[field.number] = part, {inner[name].number: name for name in names}
    return numbers


NUMBERS = _numbers()


def parse(given: bytes) -> agent_pb2.ConnectRequest:
    """Return the message. Raises InvalidRequest if it has too much of something, and DecodeError if it cannot be
    parsed."""
    if len(given) > SMALL_BYTES:
        _check(given)
    message = agent_pb2.ConnectRequest.FromString(given)
    if len(given) > SMALL_BYTES and message.HasField("step"):
        for part in COLUMNS:
            if (rows := len(getattr(message.step, part).slot)) > MAX_SLOTS:
                raise InvalidRequest(f"step.{part}", f"must have at most {MAX_SLOTS} rows; got {rows}")
    return message


def _check(given: bytes) -> None:
    """Raise InvalidRequest if the message has too many entries, or too much beside them."""
    entries, tags, rest, most = Counter[str](), 0, 0, OTHER_BYTES
    for number, begin, end in fields(given, 0, len(given), MAX_TAGS + 1):
        tags += 1
        if number not in NUMBERS:
            rest += end - begin
        else:
            part, names = NUMBERS[number]
            most = REPORT_BYTES
            for inner, start, stop in fields(given, begin, end, len(given)):
                if (name := names.get(inner)) is None:
                    rest += stop - start
                    tags += 1
                elif stop - start > ENTRY_BYTES:
                    raise InvalidRequest(f"{part}.{name}", f"must have at most {ENTRY_BYTES} bytes in an entry")
                else:
                    entries[name] += 1
                    if entries[name] > MAX_SLOTS:
                        raise InvalidRequest(f"{part}.{name}", f"must have at most {MAX_SLOTS} entries")
                if tags > MAX_TAGS:
                    break
        if rest > most or tags > MAX_TAGS:
            raise InvalidRequest("message", f"must have at most {most} bytes and {MAX_TAGS} fields beside its requests")
