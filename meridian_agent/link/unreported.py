"""Knows which thinking tokens no stream has brought to the control plane, so that the next snapshot says them and they
count for budgets and tenants.

While a stream is heard, all that is queued on it counts as brought, and nothing is counted here. Once records cannot be
queued any more, or no answer has come for SILENT_S seconds, the thinking tokens so far of each request are noted as
told; those that follow are unreported, also those of requests that end meanwhile. A snapshot says them, and they count
as brought once the control plane has answered it. So a stream that breaks off loses the reports under way, one whose
replica falls silent those of about SILENT_S seconds, and one that the agent leaves, because it is sent away, none.
Thinking that is found when a live request is read again is brought by the next snapshot, also if the request has ended
by then. No token counts twice, unless a replica takes in messages and never answers them. Runs on the engine-core
thread, except where stated.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from meridian_agent.core.request_info import MAX_TOKENS

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

    from meridian_agent.core.live_request import LiveRequest
    from meridian_agent.core.step_record import StepRecord

# Seconds without an answer after which what is queued no longer counts as brought. The control plane answers at least
# once a second, and a report may wait for half a second.
SILENT_S = 2.0
# Largest number of groups of ended requests, whose names clients choose; the tokens of all further ones are added up
# under OTHER.
MAX_GROUPS = 256


class Group(NamedTuple):
    """The texts of ended requests that thinking budgets and the counters of tenants match on."""

    model: str
    tenant: str
    slo_class: str
    effort: str


OTHER = Group("(other)", "(other)", "(other)", "(other)")


class Unreported:
    """The unreported tokens of one engine. `live` has the live requests by id; their agent sets it. `session_id` and
    `heard_step` belong to the newest stream and are set on the link's thread: its session, and the newest step that an
    answer has named."""

    def __init__(self) -> None:
        self.live: Mapping[str, LiveRequest] = {}
        self.session_id = ""
        self.heard_step = 0
        # Session of the newest stream that has brought tokens.
        self.reported_session_id = ""
        # Step whose answer shows that all that is queued arrives, and its session; None while nothing is queued.
        self._awaited_step: int | None = None
        self._awaited_session_id = ""
        # Newest step whose record was not queued.
        self._lost_step = 0
        # Tokens of ended requests: those to say in the next snapshot, and those that the present stream has been told,
        # but has perhaps not brought.
        self._ended: Counter[Group] = Counter()
        self._said: Counter[Group] = Counter()
        # Thinking tokens that live requests turned out to have when they were read again, until a snapshot has them.
        self._found: Counter[LiveRequest] = Counter()
        # Requests that have ended since the newest record, on a stream that has taken all records so far.
        self._ending: list[LiveRequest] = []
        # Thinking tokens that live requests had when no record could be queued any more, if what was queued since their
        # tokens were noted as told has perhaps not been brought.
        self._queued: dict[LiveRequest, int] = {}

    @property
    def arrives(self) -> bool:
        """Whether the control plane has answered, so that all that is queued counts as brought."""
        return self._awaited_step is not None and self.heard_step >= self._awaited_step

    @property
    def is_settled(self) -> bool:
        """Whether all that is queued counts as brought, or nothing is queued."""
        return self._awaited_step is None or self.arrives

    def lose(self, record: StepRecord) -> None:
        """Note that a record is not queued, because there is no stream or because the ring is full."""
        self._lost_step = record.step
        if not self.arrives and self._awaited_step is not None:
            self._queued = self._before(record)
            self._end(record, self._ended)
        self._note_told(record, self._ended)
        self._awaited_step = None

    def fall_silent(self, record: StepRecord) -> None:
        """Note that no answer has come for SILENT_S seconds. The record is about to be queued."""
        if self.arrives:
            self._note_told(record, self._said)
            self._awaited_step = record.step

    def queue(self) -> None:
        """Note that a record is queued, with all tokens of the requests that have ended."""
        self._ending.clear()

    def _before(self, record: StepRecord) -> dict[LiveRequest, int]:
        """Return the thinking tokens that the live requests had before the record, without those that were found."""
        new = record.think_tokens()
        return {live: live.think_tokens - new[live.slot] - self._found[live] for live in self.live.values()}

    def _note_told(self, record: StepRecord, ended: Counter[Group]) -> None:
        """Note that all tokens before the record's were brought, unless that was not known before. ended: takes the
        record's tokens of requests that end in it."""
        if not self.arrives:
            return
        for live, tokens in self._before(record).items():
            live.told_think_tokens = tokens
        self._said.clear()
        self._end(record, ended)
        self.reported_session_id = self._awaited_session_id

    def _end(self, record: StepRecord, ended: Counter[Group]) -> None:
        """Add the record's tokens of requests that end in it to `ended`: they are not among those queued before."""
        new = record.think_tokens()
        for live in self._ending:
            group, tokens = _group(live), max(0, new[live.slot])
            if said := self._said[group]:
                self._said[group] = max(0, said - tokens)
            _add(ended, group, tokens)
        self._ending.clear()

    def reread(self, live: LiveRequest, tokens: int) -> None:
        """Note that a live request was read again and has so many more thinking tokens than before."""
        self._found[live] += max(0, tokens)

    def close(self, live: LiveRequest) -> None:
        """Note that a request ends. The first token of a request that another engine decodes is generated there once
        more."""
        found, arrives = self._found.pop(live, 0), self.arrives
        if live.info.remote_decode:
            return
        if self._awaited_step is not None:
            self._ending.append(live)
        if arrives and not found:
            return
        group = _group(live)
        _add(self._ended, group, found)
        if not arrives:
            untold = max(0, live.untold_think_tokens - found)
            queued = untold
            if self._awaited_step is None:
                queued = min(untold, max(0, self._queued.pop(live, 0) - live.told_think_tokens))
            _add(self._said, group, queued)
            _add(self._ended, group, untold - queued)

    def begin_stream(self, record: StepRecord) -> None:
        """Begin a stream, whose snapshot precedes the record."""
        self._note_told(record, self._ended)
        self._say_again()

    def _say_again(self) -> None:
        self._awaited_step = None
        for group, tokens in self._said.items():
            _add(self._ended, group, tokens)
        self._said.clear()

    def tell(self, step: int, slots: Container[int]) -> list[tuple[Group, int]]:
        """Return the tokens of ended requests for the snapshot of the live requests in these slots, at the record of
        this step. The control plane answers a snapshot at once if it says unreported tokens; any other need not be
        awaited."""
        self._found.clear()
        self._queued.clear()
        self._ending.clear()
        # No answer can have named this step, but the control plane of an earlier stream may have named any.
        self.heard_step = min(self.heard_step, max(0, step - 1))
        ended = list(self._ended.items())
        for group, tokens in ended:
            _add(self._said, group, tokens)
        self._ended.clear()
        if self._awaited_step is None:
            says = ended or any(live.untold_think_tokens and live.slot in slots for live in self.live.values())
            self._awaited_step, self._awaited_session_id = step if says else 0, self.session_id
        return ended

    # ----------------------------------------------------------------------------------------- the link's own thread

    def heard(self, step: int) -> None:
        """Note that an answer has named a step."""
        self.heard_step = max(self.heard_step, step)

    def tell_idle(self) -> tuple[int, list[tuple[Group, int]]]:
        """Begin a stream of an engine without requests; return the step of a snapshot and what it is to say. The engine
        stays idle meanwhile."""
        if self.arrives:
            return 0, []
        self._say_again()
        return self._lost_step, self.tell(self._lost_step, ()) if self._ended else []


def _group(live: LiveRequest) -> Group:
    info = live.info
    return Group(info.model, info.tenant, info.slo_class, info.effort)


def _add(counter: Counter[Group], group: Group, tokens: int) -> None:
    if tokens:
        known = group in counter or len(counter) < MAX_GROUPS
        group = group if known else OTHER
        counter[group] = min(counter[group] + tokens, MAX_TOKENS)
