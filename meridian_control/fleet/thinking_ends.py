"""Ends the thinking of a request for an operator, on whichever replica has the stream of the request's engine.

The module finds the request by its id among the live requests of all replicas, and passes the call on. Only the replica
with the engine's stream makes a decision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meridian.v1 import fleet_pb2

from meridian_control.common.errors import InvalidRequest, NotFound, ReplicaUnavailable
from meridian_control.fleet import decision_queries
from meridian_control.fleet.peers import CALL_TIMEOUT_S
from meridian_control.fleet.trace_records import end_record
from meridian_control.fleet.whole_fleet import CONNECTED
from meridian_control.journal.request_ids import is_called

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meridian_control.engine.operator_ends import OperatorEnd
    from meridian_control.fleet.connection import Connection
    from meridian_control.fleet.fleet import Fleet
    from meridian_control.fleet.peers import Peer
    from meridian_control.fleet.whole_fleet import WholeFleet

    Asked = fleet_pb2.EndThinkingRequest
    Answer = fleet_pb2.EndThinkingResponse

# Longest time that a call waits for the outcome of its decision, in milliseconds.
MAX_WAIT_MS = 5000
# Largest number of requests that the error about an ambiguous id names.
NAMED = 16


async def end_thinking(whole: WholeFleet, request: Asked) -> Answer:
    """End the thinking of a live request, and wait for the outcome if the caller asks for it.

    Raises NotFound if no live request has the id, InvalidRequest if several have it, ReplicaUnavailable if a replica
    that may have the request does not answer, and PermissionDenied if that replica refuses calls of this one.
    """
    if not request.request_id:
        raise InvalidRequest("request_id", "must not be empty")
    if request.wait_ms < 0:
        raise InvalidRequest("wait_ms", f"must be at least 0; got {request.wait_ms}")
    state = await whole.state(request.engine_id, request.local_only)
    matches = _matches(state.requests, request.request_id)
    if len(matches) > 1:
        names = [f'"{request_id}" on {engine_id}' for engine_id, request_id in matches[:NAMED]]
        names += [f"{len(matches) - NAMED} more"] if len(matches) > NAMED else []
        raise InvalidRequest("request_id", f"{request.request_id!a} is ambiguous; it names {', '.join(names)}")
    if not matches:
        return await _not_live(whole, request, state)
    ((engine_id, request_id),) = matches
    # After an engine has moved, its old stream may still seem open, so the replica of the newest stream comes first.
    engines = [e for e in state.engines if e.engine_id == engine_id and e.state == CONNECTED]
    engines.sort(key=lambda engine: engine.connect_time.ToNanoseconds(), reverse=True)
    gone = NotFound(f'no live request "{request_id}" on engine "{engine_id}"')
    for replica_id in dict.fromkeys(engine.replica for engine in engines):
        try:
            return await _end_at(whole, replica_id, engine_id, request_id, request)
        except NotFound as error:
            gone = error
    raise gone


async def _end_at(whole: WholeFleet, replica_id: str, engine_id: str, request_id: str, request: Asked) -> Answer:
    """End the thinking of a request of an engine that is connected to the replica `replica_id`."""
    wait_s = min(request.wait_ms, MAX_WAIT_MS) / 1000
    if whole.peers is not None and replica_id != whole.replica_id:
        passed_on = fleet_pb2.EndThinkingRequest(
            request_id=request_id, engine_id=engine_id, reason=request.reason, wait_ms=request.wait_ms, local_only=True
        )

        async def ask(peer: Peer) -> Answer:
            return await peer.fleet.EndThinking(passed_on, timeout=CALL_TIMEOUT_S + wait_s)

        return await whole.peers.ask_one(replica_id, ask)
    # While one stream is waited for, another one may begin to take something in.
    while busy := [c for c in whole.fleet.connections.of_engine(engine_id) if c.busy]:
        await busy[0].free(whole.fleet.turns)
    connection, ended = end_here(whole.fleet, engine_id, request_id, request.reason)
    answer = fleet_pb2.EndThinkingResponse(
        state=ended.state, request_id=request_id, engine_id=engine_id, think_tokens=ended.think_tokens
    )
    if (decision := ended.decision) is not None:
        if wait_s:
            await connection.wait_for_outcome(decision, wait_s)
        answer.session_id, answer.decision_id = connection.session.session_id, decision.decision_id
        answer.reason, answer.outcome, answer.detail = decision.reason, decision.outcome, decision.detail
        answer.think_tokens = decision.outcome_think_tokens or ended.think_tokens
    return answer


def end_here(fleet: Fleet, engine_id: str, request_id: str, reason: str) -> tuple[Connection, OperatorEnd]:
    """End the thinking of a live request of this replica, whose engine's streams must be free; return its engine's
    connection too.

    Raises NotFound if no live request of the engine has this id.
    """
    for connection in [*fleet.connections.of_engine(engine_id)][::-1]:
        session, now = connection.session, fleet.clock()
        if (ended := session.on_end_thinking(request_id, reason, now)) is not None:
            connection.note(end_record, now, request_id)
            connection.say(ended.responses, now)
            return connection, ended
    raise NotFound(f'no live request "{request_id}" on engine "{engine_id}"')


async def _not_live(whole: WholeFleet, request: Asked, state: fleet_pb2.WatchFleetResponse) -> Answer:
    """Answer about a request that no table has: it may be live on an engine whose agent is off."""
    if state.unreachable_replicas:
        raise ReplicaUnavailable(state.unreachable_replicas)
    asked = fleet_pb2.ExplainRequestRequest(
        request_id=request.request_id, engine_id=request.engine_id, local_only=request.local_only
    )
    why = ""
    try:
        life = (await decision_queries.explain(whole, asked)).life
    except NotFound:
        life = fleet_pb2.RequestLife()
    if life.HasField("close_time"):
        why = "; it has finished"
    elif any((e.engine_id, e.incarnation) == (life.engine_id, life.incarnation) and e.fault for e in state.engines):
        off = fleet_pb2.END_THINKING_STATE_AGENT_OFF
        return fleet_pb2.EndThinkingResponse(
            state=off, request_id=life.request_id, engine_id=life.engine_id, think_tokens=life.think_tokens
        )
    elif life.request_id:
        why = f'; engine "{life.engine_id}", which had it, has no stream or no longer reports it'
    where = f'engine "{request.engine_id}"' if request.engine_id else "any engine"
    raise NotFound(f'no live request "{request.request_id}" on {where}{why}')


def _matches(requests: Iterable[fleet_pb2.LiveRequest], request_id: str) -> list[tuple[str, str]]:
    """Return engine id and request id of the requests with this id, or else of those with it as the client's part."""
    matches = sorted({(r.engine_id, r.request_id) for r in requests if is_called(r.request_id, request_id)})
    return [pair for pair in matches if pair[1] == request_id] or matches
