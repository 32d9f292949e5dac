"""Answers questions about the engines and the live requests of one replica with messages of FleetService.

All code runs on the server's event loop. Questions about many engines or requests let the loop do other work meanwhile.
"""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING

from meridian_control.common.errors import NotFound
from meridian_control.fleet.status_messages import (
    agent_state,
    each_request_view,
    request_view,
    subject_among,
)
from meridian_control.fleet.turns import in_parts, in_turns
from meridian_control.journal.request_ids import is_called

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from meridian.v1 import agent_pb2, fleet_pb2

    from meridian_control.engine.session import Session
    from meridian_control.fleet.connections import Connections
    from meridian_control.fleet.departed import Departed
    from meridian_control.policy.diff import Subject


class Views:
    """The engines and live requests of one replica, as messages.

    connections and departed: the fleet's own. engine_view: returns a session's engine as a message; its second argument
    says whether the engine's stream is open.
    """

    def __init__(
        self,
        connections: Connections,
        departed: Departed,
        clock: Callable[[], datetime],
        engine_view: Callable[[Session, bool], fleet_pb2.Engine],
    ) -> None:
        self._connections, self._departed, self._clock = connections, departed, clock
        self._engine_view = engine_view

    async def engines_in_turns(self) -> list[fleet_pb2.Engine]:
        """Return all engines, those that left included; let the event loop do other work in between."""
        views = {c: self._engine_view(c.session, True) async for c in in_turns(list(self._connections))}
        # Engines may have come and gone meanwhile.
        live = [views[c] if c in views else self._engine_view(c.session, True) for c in self._connections]
        ids = {e.engine_id for e in live}
        gone = [engine for engine in self._departed.views(self._clock()) if engine.engine_id not in ids]
        return sorted([*live, *gone], key=lambda e: (e.engine_id, e.incarnation))

    def agent_states(self) -> list[tuple[str, agent_pb2.AgentState.ValueType]]:
        """Return the id and the agent's state of each engine, in the order of `engines_in_turns`, but make no
        messages."""
        live = [(s.hello.engine_id, s.hello.incarnation, agent_state(s)) for s in self._connections.sessions]
        away = [e for e in self._departed.views(self._clock()) if not self._connections.of_engine(e.engine_id)]
        gone = [(e.engine_id, e.incarnation, e.agent_state) for e in away]
        return [(engine_id, state) for engine_id, _, state in sorted([*live, *gone], key=lambda row: row[:2])]

    async def requests_in_turns(self, engine_id: str) -> list[fleet_pb2.LiveRequest]:
        """Return the live requests of one engine, or of all for an empty id, sorted; let the event loop do other work
        in between."""
        keyed: list[tuple[tuple[str, str], fleet_pb2.LiveRequest]] = []
        for session in self._sessions(engine_id):
            async for views in in_parts(each_request_view(session)):
                keyed += [((request.engine_id, request.request_id), request) for request in views]
        keyed.sort(key=itemgetter(0))
        return [request for _, request in keyed]

    def requests_called(self, engine_id: str, request_id: str) -> list[fleet_pb2.LiveRequest]:
        """Return the live requests that have an id or have it as the client's part of theirs, of one engine or of all
        for an empty `engine_id`."""
        live = []
        for session in self._sessions(engine_id):
            slots = [slot for slot, info in session.table.requests() if is_called(info.request_id, request_id)]
            live += [request_view(session, slot) for slot in slots]
        return live

    def subject(self, engine_id: str, request_id: str) -> Subject:
        """Return the engine or live request for which a policy is explained.

        An empty `engine_id` stands for any engine. Raises NotFound if this replica does not know the engine or request.
        """
        sessions = self._sessions(engine_id)
        if engine_id and not sessions:
            raise NotFound(f'no engine "{engine_id}" is connected')
        return subject_among(sessions, engine_id, request_id)

    def _sessions(self, engine_id: str) -> list[Session]:
        """Return the sessions of one engine, or all for an empty id."""
        connections = self._connections.of_engine(engine_id) if engine_id else self._connections
        return [connection.session for connection in connections]
