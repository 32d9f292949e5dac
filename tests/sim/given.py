"""The policies that each engine was given over all its streams, and the ones that may be in force.

A session knows only its own stream; an engine outlives streams and control planes, and goes on with its newest
settings. The records come from the messages of the control plane and of agents; the module knows neither engines nor
agents.
"""

from __future__ import annotations

from meridian.v1 import agent_pb2

from meridian_control.engine.session import Session
from meridian_control.engine.settings_delivery import model_of
from meridian_control.policy.model import Policy


class Given:
    """The policies of one engine, for as long as its id is known.

    `free` has the requests whose thinking may have ended in another way than at vLLM's end marker alone. Such requests
    were live during a freeze, or while a policy with a closing text or with its own markers may have been in force.
    """

    def __init__(self) -> None:
        self.free: set[str] = set()
        # Every policy that the engine was ever given, by revision, and the policies without an answer, by session and
        # nonce.
        self._known: dict[int, Policy] = {}
        self._under_way: dict[tuple[str, int], Policy] = {}
        # Policies that a later answer has overtaken, by session and nonce: a message of an engine that is gone may
        # still arrive.
        self._overtaken: dict[tuple[str, int], Policy] = {}
        # The policy that each session's agent acknowledged last, and the revisions sent on each session.
        self.acknowledged: dict[str, Policy] = {}
        # The policy that each session's agent answered last, also if a newer one was under way by then.
        self._answered: dict[str, Policy] = {}
        self._sent: set[tuple[str, int]] = set()
        # Sessions with such a freeze or policy; all sessions on which settings were sent, oldest first.
        self._loose: set[str] = set()
        self._streams: list[str] = []

    def unanswered(self, session_id: str, revision: int, policy: Policy) -> None:
        """Note a policy that was sent on a stream of which nothing more is known."""
        self._note_stream(session_id)
        self._known[revision] = self._under_way[session_id, revision] = policy

    def _note_stream(self, name: str) -> None:
        if name not in self._streams:
            self._streams.append(name)

    def give(self, session: Session, settings: agent_pb2.Settings) -> None:
        """Note settings sent to the engine, and check that they are neither repeated nor known to be refused."""
        name, revision = session.session_id, settings.revision
        assert revision not in session.delivery.refused, f"revision {revision}, which the agent refuses, is sent again"
        assert (name, revision) not in self._sent, f"revision {revision} is sent twice"
        assert session.delivery.pending is not None
        self._sent.add((name, revision))
        self._note_stream(name)
        self._known[revision] = self._under_way[name, settings.nonce] = session.delivery.pending[1]

    def answer(self, session: Session, status: agent_pb2.SettingsStatus) -> None:
        """Note the engine's answer to settings. A refusal may come before the answer to settings sent earlier."""
        name = session.session_id
        given = self._under_way.get((name, status.nonce)) or self._overtaken.pop((name, status.nonce), None)
        if status.error:
            # Settings that a fault has refused may be in force already.
            if "injected" not in status.error:
                self._under_way.pop((name, status.nonce), None)
            return
        if given is None:
            return
        # The answer replaces everything that was sent before it, on older streams too. An old stream's answer may
        # arrive after a new stream has begun.
        at, before = self._streams.index, self._under_way
        self._under_way = {
            (stream, nonce): policy
            for (stream, nonce), policy in self._under_way.items()
            if (at(stream), nonce) > (at(name), status.nonce)
        }
        self._overtaken |= {key: before[key] for key in before.keys() - self._under_way.keys() if key[0] != name}
        self._answered[name] = given
        # If several settings were sent, only the newest count.
        if session.delivery.pending is not None and session.delivery.nonce == status.nonce:
            self.acknowledged[name] = given

    def look(self, session: Session, message: agent_pb2.ConnectRequest | None = None) -> None:
        """Note which requests are free: the live ones, and those that the message opens.

        The requests of a later snapshot on such a stream are free, too, because it is not known since when they live.
        """
        name, heard = session.session_id, message or agent_pb2.ConnectRequest()
        if session.frozen or self._is_loose(session):
            self._loose.add(name)
            self.free |= {info.request_id for _, info in session.table.requests()}
            self.free |= {request.request_id for request in heard.step.opened}
        if name in self._loose:
            self.free |= {request.request_id for request in heard.snapshot.requests}

    def _is_loose(self, session: Session) -> bool:
        may_hold, revision = list(self._under_way.values()), session.hello.revision
        if (answered := self._answered.get(session.session_id)) is not None:
            may_hold.append(answered)
        elif revision in self._known:
            may_hold.append(self._known[revision])
        elif revision:
            return True
        models = [model_of(policy, session.hello) for policy in may_hold]
        return any(model.closing_text or model.think_end_token_ids for model in models)
