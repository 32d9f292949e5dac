"""Finds what another policy would have changed in a trace, by replaying the trace under both policies side by side.

The module defines what counts as a change of a request or a step. The module knows nothing of output. The same trace
and policy always give the same figures, in the same order.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from meridian_control.common.enum_names import reason_name
from meridian_control.common.errors import BadReport, MeridianError
from meridian_control.decisions import moments
from meridian_control.decisions.token_rows import FLAG_FORCED
from meridian_control.offline.policy_replay import ReplayResult, SessionReplay, ThinkEnd
from meridian_control.offline.trace_file import FileError, read
from meridian_control.session.think_ends import FINISHED, by_limit

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from meridian.v1 import agent_pb2, fleet_pb2

    from meridian_control.policy.model import Policy

# Reasons for an end of thinking, besides the names of the rules.
NATURAL, UNKNOWN, UNENDED, CAP, RESERVE = "natural", "unknown", "unended", "hard_cap", "answer_reserve"
BY_ITSELF = (NATURAL, UNENDED, UNKNOWN)
# Tokens that a forced end is assumed to have: a trace does not say how many the engine's end marker has.
MARKER_TOKENS = 1


@dataclass(frozen=True)
class ComparedRequest:
    """One request under both policies. The tokens of an end are those known when the end was decided.

    `recorded` is the end in the recording. If the reason of `after` is `unknown`, thinking would have gone on there.
    """

    request_id: str
    engine_id: str
    recorded: ThinkEnd
    before: ThinkEnd
    after: ThinkEnd
    # The request's decisions under the recorded and under the new policy.
    fates: tuple[ReplayResult, ReplayResult]

    @property
    def change(self) -> str:
        """How the new policy changes the end of thinking: same, added, gone or moved."""
        if self.before == self.after:
            return "same"
        early, late = (place.reason in BY_ITSELF for place in (self.before, self.after))
        if early and late:
            return "same"
        return "added" if early else "gone" if late else "moved"


@dataclass
class Steps:
    """Counts, over the reports of all sessions, how orders and limits differ between the policies."""

    reports: int = 0
    # Reports after which some live requests are in another order; pairs of live requests; pairs in another order.
    other_order: int = 0
    pairs: int = 0
    other_pairs: int = 0
    # Reports after which the limits of a step differ; by limit, the reports after which each policy sets the limit.
    other_share: int = 0
    limited: dict[str, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))


@dataclass
class _Request:
    """A live request, with the end of its thinking in the recording."""

    opened: agent_pb2.RequestOpened
    whole: bool
    end: ThinkEnd | None = None
    forced_by: str = UNKNOWN
    closed: bool = False


class _Session:
    """Replays one recorded session under both policies."""

    def __init__(self, hello: fleet_pb2.TraceRecord, policy: Policy) -> None:
        self.engine_id = hello.engine_id
        self.runs = SessionReplay(hello, None), SessionReplay(hello, policy)
        self.requests: dict[int, _Request] = {}
        self.event: fleet_pb2.TraceRecord | None = None
        self.said: list[agent_pb2.ConnectResponse] = []
        self.order: tuple[int, int] = (0, 0)


class Difference:
    """Compares traces under their recorded policies with the same traces under `policy`."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._sessions: dict[str, _Session] = {}
        self.outcomes: list[ComparedRequest] = []
        self.left_out: Counter[str] = Counter()
        # Sentences on removed fields that recorded policies set.
        self.removed: dict[str, None] = {}
        self.steps = Steps()
        self.sessions = 0
        # By engine id: the error with which the engine would refuse the new policy.
        self.refused: dict[str, str] = {}
        # By revision: the policy that the recorded sessions were given.
        self.recorded: dict[int, Policy] = {}
        self.reproduced = self.of_decisions = 0
        # EAT probes that each policy asked for, and the probes that got a recorded sample.
        self.probes, self.samples = [0, 0], [0, 0]

    def add(self, paths: Iterable[Path]) -> None:
        """Compare the sessions in trace files. Raises FileError."""
        for path in paths:
            for number, record in enumerate(read(path)):
                try:
                    self._take(record)
                except (MeridianError, IndexError) as error:
                    raise FileError(path, "", f"record {number}: {error}") from error
            for session in self._sessions.values():
                self._finish(session)
            self._sessions.clear()

    def _take(self, record: fleet_pb2.TraceRecord) -> None:
        if record.up.HasField("hello"):
            if (before := self._sessions.get(record.session_id)) is not None:
                self._finish(before)
            self._sessions[record.session_id] = _Session(record, self._policy)
            self.sessions += 1
            return
        session = self._sessions.get(record.session_id)
        if session is None:
            raise BadReport("its session has no Hello before it")
        if record.HasField("down") and not record.down.HasField("freeze"):
            session.said.append(record.down)
            return
        # A trace has the responses to a message after the message, so all responses to the previous one are known now.
        self._play(session)
        session.event, session.said = record, []

    def _play(self, session: _Session) -> None:
        event, session.event = session.event, None
        if event is None:
            return
        for run in session.runs:
            run.take(event, session.said)
        if event.HasField("policy"):
            self.recorded[event.policy.revision] = session.runs[0].given
            self.removed |= dict.fromkeys(map(str, session.runs[0].removed))
        for response in session.said:
            for force in response.directives.forces:
                if not force.shadow and (request := session.requests.get(force.slot)) is not None:
                    request.forced_by = reason_name(force.reason)
        if event.up.HasField("snapshot"):
            self._snapshot(session, event.up.snapshot)
        elif event.up.HasField("step"):
            self._step(session, event.up.step)

    def _snapshot(self, session: _Session, snapshot: agent_pb2.Snapshot) -> None:
        self.left_out["reports were lost"] += len(session.requests)
        session.requests = {}
        for opened in snapshot.requests:
            if opened.think_tokens or opened.output_tokens:
                self.left_out["began before the trace"] += 1
            else:
                session.requests[opened.slot] = _Request(opened, True)

    def _step(self, session: _Session, report: agent_pb2.StepReport) -> None:
        table = session.runs[0].session.table
        for opened in report.opened:
            session.requests[opened.slot] = _Request(opened, True)
        for change in moments.changes(table) if report.steps else ():
            request = session.requests.get(change.slot)
            if change.kind == "think_end" and request is not None and request.end is None:
                forced = request.forced_by if change.flags & FLAG_FORCED else NATURAL
                request.end = ThinkEnd(by_limit(change.flags) or forced, change.think_tokens)
        for closed in report.closed:
            if (request := session.requests.pop(closed.slot, None)) is not None:
                self._close(session, request, closed, int(table.think_tokens[closed.slot]))
        if report.steps:
            self._compare(session)

    def _close(self, session: _Session, request: _Request, closed: agent_pb2.RequestClosed, think_tokens: int) -> None:
        if not think_tokens and request.end is None:
            self.left_out["did not think"] += 1
            return
        if request.end is None and closed.reason not in FINISHED:
            self.left_out["aborted while thinking"] += 1
            return
        recorded = request.end or ThinkEnd(UNENDED, think_tokens)
        before, after = (run.fates.pop(closed.slot, ReplayResult()) for run in session.runs)
        before_end, after_end = (_end(request.opened, recorded, fate, before) for fate in (before, after))
        who = request.opened.request_id, session.engine_id
        self.outcomes.append(ComparedRequest(*who, recorded, before_end, after_end, (before, after)))

    def _compare(self, session: _Session) -> None:
        before, after = session.runs
        if before.changed or after.changed:
            session.order = _reordered(before, after)
            before.changed = after.changed = False
        steps = self.steps
        steps.reports += 1
        steps.pairs += session.order[0]
        steps.other_pairs += session.order[1]
        steps.other_order += session.order[1] > 0
        steps.other_share += before.share != after.share
        for side, run in enumerate(session.runs):
            for name, value in run.share._asdict().items():
                if name != "max_skip_steps" and value not in (None, False):
                    steps.limited[name][side] += 1

    def _finish(self, session: _Session) -> None:
        self._play(session)
        self.left_out["still under way at the end of the trace"] += len(session.requests)
        before, after = session.runs
        self.reproduced += before.reproduced
        self.of_decisions += max(before.recorded, sum(before.decisions.values()))
        if after.session.nack_error:
            self.refused[session.engine_id] = after.session.nack_error
        for side, run in enumerate((before, after)):
            self.probes[side] += run.probes
            self.samples[side] += run.samples


def _end(
    opened: agent_pb2.RequestOpened, recorded: ThinkEnd, fate: ReplayResult, recorded_fate: ReplayResult
) -> ThinkEnd:
    """Return the end of thinking under a policy: by a force, by the cap, by the answer reserve, or by the model."""
    length, by_itself = recorded.think_tokens, recorded.reason in (NATURAL, UNENDED)
    force, limit = fate.force, _limit(opened, recorded, fate, recorded_fate)
    if limit is not None and limit == _limit(opened, recorded, recorded_fate, recorded_fate):
        # The recording shows when this limit took effect, or that it came too late.
        limit = recorded if recorded.reason in (CAP, RESERVE) else None if by_itself else limit
    if (
        limit is not None
        and (force is None or limit.think_tokens <= force.think_tokens)
        and (limit.think_tokens < length or limit == recorded)
    ):
        return limit
    # A force that is decided from the last thinking token comes too late if the model itself ends thinking there.
    if force is not None and (force.think_tokens < length or not by_itself):
        return force
    return recorded if by_itself else ThinkEnd(UNKNOWN, length)


def _limit(
    opened: agent_pb2.RequestOpened, recorded: ThinkEnd, fate: ReplayResult, recorded_fate: ReplayResult
) -> ThinkEnd | None:
    """Return where a policy's caps and answer reserves end thinking; None if they let it go on.

    A cap below the thinking so far ends thinking at once, unless another one comes before the next token.
    """
    own = [opened.max_think_tokens] if opened.HasField("max_think_tokens") else []
    last = max((since for since in recorded_fate.caps if since < recorded.think_tokens), default=0)
    recorded_reserve = recorded_fate.caps[last].reserve_tokens
    begins = sorted(fate.caps)
    for since, until in zip(begins, [*begins[1:], math.inf], strict=True):
        cap = fate.caps[since]
        # The agent enforces a request's own cap even if the policy's caps are in shadow.
        in_force = [cap.max_think_tokens] if cap.max_think_tokens is not None and not cap.shadow else []
        limits = [ThinkEnd(CAP, max(tokens, since)) for tokens in own + in_force]
        if _held_back(opened, cap.reserve_tokens) and not cap.shadow:
            reserved_at = _reserved_at(opened, recorded, cap.reserve_tokens, recorded_reserve)
            limits.append(ThinkEnd(RESERVE, max(reserved_at, since)))
        first = min(limits, key=lambda end: end.think_tokens, default=None)
        if first is not None and first.think_tokens <= until:
            return first
    return None


def _reserved_at(
    opened: agent_pb2.RequestOpened, recorded: ThinkEnd, reserve_tokens: int, recorded_reserve_tokens: int
) -> int:
    """Return the number of thinking tokens at which an answer reserve ends thinking. recorded_reserve_tokens: the
    reserve in force at the end of the recorded thinking.

    The number is exact if a reserve ended the recorded thinking too. Otherwise it assumes that only max_tokens limits
    the request, and that the forced end has MARKER_TOKENS.
    """
    held = _held_back(opened, reserve_tokens)
    if recorded.reason == RESERVE:
        return max(0, recorded.think_tokens - (held - _held_back(opened, recorded_reserve_tokens)))
    return max(0, opened.max_tokens - held - MARKER_TOKENS)


def _held_back(opened: agent_pb2.RequestOpened, reserve_tokens: int) -> int:
    """Return how many tokens of an answer reserve hold for a request: with the forced end at most half of its
    max_tokens, as the agent applies it."""
    return max(0, min(reserve_tokens, opened.max_tokens // 2 - MARKER_TOKENS))


def _reordered(before: SessionReplay, after: SessionReplay) -> tuple[int, int]:
    """Count the pairs of live requests, and the pairs whose order differs between the runs.

    All requests of a run that keeps vLLM's order count as equal. Requests that an ordering run has not ranked yet are
    left out.
    """
    ranked = [run.ranks.keys() for run in (before, after) if run.orders]
    slots = sorted(set.intersection(*map(set, ranked))) if ranked else []
    count, signs = len(slots), []
    if count < 2:
        return 0, 0
    for run in (before, after):
        ranks = np.array([run.ranks.get(slot, 0) if run.orders else 0 for slot in slots])
        signs.append(np.sign(ranks[:, None] - ranks[None, :]))
    return count * (count - 1) // 2, int(np.count_nonzero(signs[0] != signs[1])) // 2


def changed(outcomes: Iterable[ComparedRequest]) -> Iterator[ComparedRequest]:
    return (outcome for outcome in outcomes if outcome.change != "same")
