"""The decision log of one replica: the lives of requests, and every decision about them with what its rule saw.

Owns what is kept, for how long and for which requests. Knows neither rules nor gRPC. Sessions write to it through a
`Journal` each, in which time is what the session was given. Dispatch plans are not in it: they concern no single
request, and under `deadline` there is one in nearly every step, which would push out all else. Runs on the server's
event loop.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from meridian.v1 import agent_pb2

from meridian_control.decision_log.request_ids import sampled, shortened
from meridian_control.decisions.request_table import NO_CAP

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from datetime import datetime

    from meridian_control.decisions.history import Change
    from meridian_control.decisions.request_table import RequestTable
    from meridian_control.decisions.termination import Seen
    from meridian_control.policy.model import Policy
    from meridian_control.session.decision_ledger import Decision

# Kept by a replica: events of all lives together, and decisions in the order in which they were made.
MAX_EVENTS, MAX_DECISIONS = 1 << 16, 1 << 15
# Kept of one life, the newest: probes, of which there may be thousands, and all else.
LIFE_PROBES, LIFE_EVENTS = 64, 128

FINISH_NAMES = {
    agent_pb2.FINISH_REASON_STOP: "stop",
    agent_pb2.FINISH_REASON_LENGTH: "length",
    agent_pb2.FINISH_REASON_ABORT: "abort",
    agent_pb2.FINISH_REASON_ERROR: "error",
}
Key = tuple[str, str, str]


class Signals(NamedTuple):
    """A request as the rules saw it; NaN and 0 for what was not measured."""

    phase: int
    think_tokens: int
    output_tokens: int
    entropy_nats: float
    end_rank: int
    rpdi: float
    eat_nats: float
    eat_ema_nats: float
    eat_ema_variance: float
    eat_samples: int
    # Newest first.
    boundary_ranks: tuple[int, ...]
    # None for no cap.
    max_think_tokens: int | None


@dataclass(eq=False, slots=True)
class Event:
    """What happened to a request, and its state from then on."""

    number: int
    time: datetime
    kind: str
    phase: int
    think_tokens: int
    output_tokens: int
    detail: str = ""


@dataclass(eq=False, slots=True)
class Logged:
    """A decision about a request, whose policy held then. The outcome is unspecified until it is known."""

    number: int
    time: datetime
    life: Life
    session_id: str
    decision_id: int
    kind: str
    reason: str
    shadow: bool
    revision: int
    policy: Policy
    signals: Signals
    outcome: agent_pb2.Outcome.ValueType = agent_pb2.OUTCOME_UNSPECIFIED
    outcome_time: datetime | None = None
    outcome_think_tokens: int = 0
    detail: str = ""
    measured_eat_nats: float | None = None


@dataclass(eq=False, slots=True)
class Life:
    """One request from its opening to its end, as far as this replica heard of it."""

    engine_id: str
    incarnation: str
    # The session that tells of it.
    session_id: str
    opened: agent_pb2.RequestOpened
    open_time: datetime
    joined_late: bool
    close_time: datetime | None = None
    think_tokens: int = 0
    output_tokens: int = 0
    events: deque[Event | Logged] = field(default_factory=lambda: deque(maxlen=LIFE_EVENTS))
    probes: deque[Event | Logged] = field(default_factory=lambda: deque(maxlen=LIFE_PROBES))
    left_out: int = 0

    @property
    def key(self) -> Key:
        return self.engine_id, self.incarnation, self.opened.request_id

    def __len__(self) -> int:
        return len(self.events) + len(self.probes)

    def in_order(self) -> list[Event | Logged]:
        return sorted((*self.events, *self.probes), key=lambda event: event.number)

    def is_called(self, request_id: str) -> bool:
        """Whether that is its id, or the client's part of it; an empty one is everybody's."""
        own = self.opened.request_id
        return request_id in ("", own) or (request_id in own and request_id in shortened(own))


class DecisionLog:
    """All lives and decisions of a replica. `settled` is called with each decision once its outcome is known, `ended`
    with each life at its end; neither may raise."""

    def __init__(
        self,
        settled: Callable[[Logged], None] | None = None,
        ended: Callable[[Life], None] | None = None,
        max_events: int = MAX_EVENTS,
        max_decisions: int = MAX_DECISIONS,
    ) -> None:
        self.settled, self.ended = settled, ended
        self.events = 0
        self._max_events = max_events
        # In the order in which they began, or were over; a request whose stream is lost counts as over.
        self._live: dict[Key, Life] = {}
        self._over: dict[Key, Life] = {}
        self._decisions: deque[Logged] = deque(maxlen=max_decisions)
        self._number = 0

    def number(self) -> int:
        self._number += 1
        return self._number

    def begin(self, life: Life) -> None:
        self._forget(self._over.pop(life.key, None))
        self._forget(self._live.pop(life.key, None))
        self._live[life.key] = life

    def over(self, life: Life) -> None:
        if self._live.get(life.key) is life:
            self._over[life.key] = self._live.pop(life.key)

    def back(self, key: Key) -> Life | None:
        """A life that goes on in another session, if it is known."""
        life = self._live.get(key)
        if life is None and (life := self._over.get(key)) is not None and life.close_time is None:
            self._live[key] = self._over.pop(key)
        return life if life is not None and life.close_time is None else None

    def add(self, life: Life, event: Event | Logged, among: deque[Event | Logged]) -> None:
        """Note an event; where there is no room, the oldest life that is over goes, else the oldest of all."""
        if self._live.get(life.key) is not life:
            return
        if len(among) == among.maxlen:
            life.left_out += 1
        else:
            self.events += 1
        among.append(event)
        if isinstance(event, Logged):
            self._decisions.append(event)
        while self.events > self._max_events:
            lives = self._over or self._live
            self._forget(lives.pop(next(iter(lives))))

    def _forget(self, life: Life | None) -> None:
        self.events -= len(life) if life is not None else 0

    def find(self, request_id: str, engine_id: str) -> Life | None:
        """The newest request of that id; of the client's part of it, where no whole id fits."""
        lives = [
            life
            for life in (*self._over.values(), *self._live.values())
            if engine_id in ("", life.engine_id) and life.is_called(request_id)
        ]
        exact = [life for life in lives if life.opened.request_id == request_id]
        return max(exact or lives, key=lambda life: life.open_time, default=None)

    def decisions(self, wanted: Callable[[Logged], bool], before: datetime | None) -> Iterator[Logged]:
        """Decisions, newest first; those made before a time."""
        return (d for d in reversed(self._decisions) if (before is None or d.time < before) and wanted(d))


class Journal:
    """One session's writer. `now` is the time of the message that is being handled."""

    def __init__(self, log: DecisionLog, engine_id: str, incarnation: str, session_id: str, now: datetime) -> None:
        self._log, self._engine_id, self._incarnation, self._session_id = log, engine_id, incarnation, session_id
        self.now = now
        self._lives: dict[int, Life] = {}

    def opened(self, opened: agent_pb2.RequestOpened, ratio: float, joined_late: bool = False) -> None:
        """A request began; it is kept if it belongs to the sample of this share."""
        self._lives.pop(opened.slot, None)
        if not sampled(opened.request_id, ratio):
            return
        # A part of a message keeps all of it alive.
        copied = agent_pb2.RequestOpened()
        copied.CopyFrom(opened)
        life = Life(self._engine_id, self._incarnation, self._session_id, copied, self.now, joined_late)
        life.think_tokens, life.output_tokens = opened.think_tokens, opened.output_tokens
        self._log.begin(life)
        self._lives[opened.slot] = life
        self._note(life, "opened", opened.phase)

    def snapshot(self, requests: Iterable[agent_pb2.RequestOpened], ratio: float) -> None:
        """All live requests, told anew: those that are known go on, those that are missing ended unheard."""
        before, self._lives = self._lives, {}
        for opened in requests:
            life = self._log.back((self._engine_id, self._incarnation, opened.request_id))
            if life is None:
                self.opened(opened, ratio, joined_late=bool(opened.think_tokens or opened.output_tokens))
                continue
            self._lives[opened.slot] = life
            life.think_tokens, life.output_tokens = opened.think_tokens, opened.output_tokens
            if life.session_id != self._session_id:
                life.session_id = self._session_id
                self._note(life, "stream_back", opened.phase)
        for slot, life in before.items():
            if self._lives.get(slot) is not life:
                self._close(life, "unknown")

    def closed(self, closed: Iterable[agent_pb2.RequestClosed], table: RequestTable) -> None:
        """Requests are gone from the engine; the table still has them."""
        for request in closed:
            if (life := self._lives.pop(request.slot, None)) is not None:
                self._count(life, request.slot, table)
                self._close(life, FINISH_NAMES.get(request.reason, "unknown"))

    def happened(self, change: Change, detail: str = "") -> None:
        """Something happened to a request."""
        if (life := self._lives.get(change.slot)) is not None:
            life.think_tokens, life.output_tokens = max(0, change.think_tokens), max(0, change.output_tokens)
            self._note(life, change.kind, change.phase, detail)

    def lost(self) -> None:
        """The stream is gone; a later one may go on with the same requests."""
        for life in self._lives.values():
            if life.session_id == self._session_id:
                self._note(life, "stream_lost", agent_pb2.PHASE_UNSPECIFIED)
                self._log.over(life)
        self._lives = {}

    def decided(self, made: Decision, shadow: bool, seen: tuple[Seen, int], policy: Policy, revision: int) -> None:
        """A decision was made about a request from what was seen of it, under this policy and revision; kept where its
        life is."""
        slot = made.slot
        if slot is None or (life := self._lives.get(slot)) is None:
            return
        what = made.decision_id, made.kind, made.reason, shadow
        signals, number = signals_of(*seen), self._log.number()
        made.logged = Logged(number, self.now, life, self._session_id, *what, revision, policy, signals)
        self._log.add(life, made.logged, life.probes if made.kind == "probe" else life.events)

    def settled(self, made: Logged, outcome: agent_pb2.Outcome.ValueType, think_tokens: int, detail: str) -> None:
        made.outcome, made.outcome_time = outcome, self.now
        made.outcome_think_tokens, made.detail = think_tokens, detail
        if self._log.settled is not None:
            self._log.settled(made)

    @staticmethod
    def _count(life: Life, slot: int, table: RequestTable) -> None:
        life.think_tokens = max(0, int(table.think_tokens[slot]))
        life.output_tokens = max(0, int(table.output_tokens[slot]))

    def _note(self, life: Life, kind: str, phase: int, detail: str = "") -> None:
        event = Event(self._log.number(), self.now, kind, phase, life.think_tokens, life.output_tokens, detail)
        self._log.add(life, event, life.events)

    def _close(self, life: Life, reason: str) -> None:
        self._note(life, "closed", agent_pb2.PHASE_UNSPECIFIED, reason)
        life.close_time = self.now
        self._log.over(life)
        if self._log.ended is not None:
            self._log.ended(life)


def signals_of(seen: Seen, index: int) -> Signals:
    """A row of the table, or a moment; `signals.rpdi` of one request."""
    width, count = seen.window.shape[1], seen.entropy_count.item(index)
    total = seen.entropy_sum.item(index)
    ratio = seen.entropy_window_sum.item(index) / width / (total / count) if count >= width and total else math.nan
    known = min(seen.boundary_count.item(index), seen.boundary_ranks.shape[1])
    cap = seen.max_think_tokens.item(index)
    return Signals(
        seen.phase.item(index),
        max(0, seen.think_tokens.item(index)),
        max(0, seen.output_tokens.item(index)),
        seen.entropy_nats.item(index),
        seen.end_rank.item(index),
        ratio,
        seen.eat_nats.item(index),
        seen.eat_ema_nats.item(index),
        seen.eat_ema_variance.item(index),
        seen.eat_count.item(index),
        tuple(seen.boundary_ranks[index, :known].tolist()),
        cap if cap > NO_CAP and cap >= 0 else None,
    )
