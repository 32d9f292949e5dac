"""What each engine was given over all its streams, and what it may go by at a time.

A session knows its own stream only; an engine outlives streams and control planes, and goes on with what it has. Kept
by what the control plane says and what agents answer; knows neither engines nor agents.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meridian.v1 import agent_pb2

from meridian_control.session.settings_delivery import model_of

if TYPE_CHECKING:
    from meridian_control.policy.model import Policy
    from meridian_control.session.session import Session


class Given:
    """One engine's, for as long as it is known by its id.

    `free` are requests whose thinking may have been ended by more than vLLM's end marker, at once and alone: they were
    there while a policy with a closing text or markers of its own may have held, or a freeze.
    """

    def __init__(self) -> None:
        self.free: set[str] = set()
        # Everything it was ever given, by revision; by session and nonce what it has not answered.
        self._known: dict[int, Policy] = {}
        self._under_way: dict[tuple[str, int], Policy] = {}
        # By the same, what a later answer has come before: an engine that is no more may still be heard.
        self._overtaken: dict[tuple[str, int], Policy] = {}
        # What each session's agent has acknowledged last, and which revisions it was sent there.
        self.acknowledged: dict[str, Policy] = {}
        self._sent: set[tuple[str, int]] = set()
        # Sessions in which there was such a time; all that were sent settings, oldest first.
        self._loose: set[str] = set()
        self._streams: list[str] = []

    def unanswered(self, session_id: str, revision: int, policy: Policy) -> None:
        """It is sent a policy on a stream of which no more is known."""
        self._note_stream(session_id)
        self._known[revision] = self._under_way[session_id, revision] = policy

    def _note_stream(self, name: str) -> None:
        if name not in self._streams:
            self._streams.append(name)

    def give(self, session: Session, settings: agent_pb2.Settings) -> None:
        """It is sent settings."""
        name, revision = session.session_id, settings.revision
        assert revision not in session.delivery.refused, f"revision {revision}, which the agent refuses, is sent again"
        assert (name, revision) not in self._sent, f"revision {revision} is sent twice"
        assert session.delivery.pending is not None
        self._sent.add((name, revision))
        self._note_stream(name)
        self._known[revision] = self._under_way[name, settings.nonce] = session.delivery.pending[1]

    def answer(self, session: Session, status: agent_pb2.SettingsStatus) -> None:
        """It answers settings. A refusal may come before the answer to what was sent earlier."""
        name = session.session_id
        given = self._under_way.get((name, status.nonce)) or self._overtaken.pop((name, status.nonce), None)
        if status.error:
            # What a fault has refused may hold already.
            if "injected" not in status.error:
                self._under_way.pop((name, status.nonce), None)
            return
        if given is None:
            return
        # What was given before, on older streams too, has been replaced. An old one may be heard after a new has begun.
        at, before = self._streams.index, self._under_way
        self._under_way = {
            (stream, nonce): policy
            for (stream, nonce), policy in self._under_way.items()
            if (at(stream), nonce) > (at(name), status.nonce)
        }
        self._overtaken |= {key: before[key] for key in before.keys() - self._under_way.keys() if key[0] != name}
        # Of several that were given only the newest counts.
        if session.delivery.pending is not None and session.delivery.nonce == status.nonce:
            self.acknowledged[name] = given

    def look(self, session: Session, message: agent_pb2.ConnectRequest | None = None) -> None:
        """Note who is free: of the live requests, of those that a message tells of for the first time, and of those
        that it tells anew, for since when these live is not known."""
        name, heard = session.session_id, message or agent_pb2.ConnectRequest()
        if session.frozen or self._is_loose(session):
            self._loose.add(name)
            self.free |= {info.request_id for _, info in session.table.requests()}
            self.free |= {request.request_id for request in heard.step.opened}
        if name in self._loose:
            self.free |= {request.request_id for request in heard.snapshot.requests}

    def _is_loose(self, session: Session) -> bool:
        may_hold, revision = list(self._under_way.values()), session.hello.revision
        if (acknowledged := self.acknowledged.get(session.session_id)) is not None:
            may_hold.append(acknowledged)
        elif revision in self._known:
            may_hold.append(self._known[revision])
        elif revision:
            return True
        models = [model_of(policy, session.hello) for policy in may_hold]
        return any(model.closing_text or model.think_end_token_ids for model in models)
