"""Finds what another policy would have changed in recorded traces: gives the recorded messages to `Session` under that
policy, and compares its ends of thinking with the recorded ones.

The engine's steps stay as recorded, because it is unknown how other decisions would have changed them. The module plays
the agent: the policy's decisions count as applied at once, and a probe of the policy gets a sample that was recorded at
such a place, or no sample. The module uses no clock, only the recorded times.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import UTC
from typing import TYPE_CHECKING, Any, NamedTuple

from meridian.v1 import agent_pb2, fleet_pb2

from meridian_control.capabilities.listed import STREAM_PARTS, sections
from meridian_control.common.enum_names import reason_name
from meridian_control.common.errors import BadReport, MeridianError
from meridian_control.common.opened_request import is_under_way
from meridian_control.engine.request_table import THINK
from meridian_control.engine.session import Session
from meridian_control.engine.think_ends import FINISHED, by_limit
from meridian_control.engine.token_rows import FLAG_END, FLAG_FORCED, FLAG_FROM_OUTPUT, FLAG_MARKER, TAKE_BACK_SHIFT
from meridian_control.fleet.trace_records import given_freezes
from meridian_control.offline.trace_file import FileError, read
from meridian_control.policy.formats import check_extensions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from meridian_control.policy.model import Policy

# Reasons for an end of thinking, besides the names of the rules. UNENDED: the request ended while it thought. UNKNOWN:
# the policy would have let thinking go on, for a number of tokens that the recording does not show.
NATURAL, UNENDED, CAP, RESERVE, UNKNOWN = "natural", "unended", "hard_cap", "answer_reserve", "unknown"
# The model has stopped while it thought, and the request went on to its answer.
STOP = "premature_stop"
# Tokens that a forced end is assumed to have: a trace does not say how many the engine's end marker has.
MARKER_TOKENS = 1
ANYWHERE, GONE = agent_pb2.PLACEMENT_ANYWHERE, agent_pb2.OUTCOME_REQUEST_GONE
SIDES = "recorded", "new"
# Why a request is left out that lived when the trace began.
BEGUN = "began before the trace"
Responses = list[agent_pb2.ConnectResponse]


class ThinkEnd(NamedTuple):
    """An end of thinking. think_tokens: those at the end, or those at which the control plane decided the end."""

    reason: str
    think_tokens: int


@dataclass
class Course:
    """What a policy has decided for a request: the end of its thinking, and the limits in force since so many thinking
    tokens."""

    end: ThinkEnd | None = None
    cap: int | None = None
    reserve_tokens: int = 0
    since: int = 0

    def pass_limits(self, opened: agent_pb2.RequestOpened, tokens: int) -> None:
        """Note the end if thinking would have gone beyond a limit before it had `tokens` tokens.

        The agent enforces a request's own cap under every policy, and lets a reserve with the forced end take at most
        a quarter of max_tokens. A limit below the thinking so far ends thinking at once.
        """
        limits = [ThinkEnd(CAP, self.cap)] if self.cap is not None else []
        limits += [ThinkEnd(CAP, opened.max_think_tokens)] if opened.HasField("max_think_tokens") else []
        if (held := min(self.reserve_tokens, opened.max_tokens // 4 - MARKER_TOKENS)) > 0:
            limits.append(ThinkEnd(RESERVE, opened.max_tokens - held - MARKER_TOKENS))
        reason, place = min(limits, key=lambda end: end.think_tokens, default=(UNKNOWN, tokens))
        if self.end is None and max(place, self.since) < tokens:
            self.end = ThinkEnd(reason, max(place, self.since))


@dataclass
class LiveRequest:
    """A live request of the recording, with what was decided for it and what the policy decides.

    asked: the policy's probes without a sample yet, with the thinking tokens when they were asked for. ends: the ends
    of thinking in the recording and under the policy, once thinking has ended in the recording.
    """

    opened: agent_pb2.RequestOpened
    recorded: Course = field(default_factory=Course)
    new: Course = field(default_factory=Course)
    asked: list[tuple[agent_pb2.EatProbe, int]] = field(default_factory=list)
    ends: tuple[ThinkEnd, ThinkEnd] | None = None

    def end(self, recorded: ThinkEnd) -> None:
        """Note the end of thinking in the recording, which shows what came of a decision that both policies make."""
        by_itself, was, new = recorded.reason in (NATURAL, UNENDED, STOP), self.recorded, self.new
        for course in (was, new):
            course.pass_limits(self.opened, recorded.think_tokens + (recorded.reason in (CAP, RESERVE)))
        limits_same = (was.cap, was.reserve_tokens, was.since) == (new.cap, new.reserve_tokens, new.since)
        same = was.end == new.end and (new.end is not None or by_itself or limits_same)
        # A force that is decided from the last thinking token comes too late if the model itself ends thinking there.
        if same or (by_itself and (new.end is None or new.end.think_tokens >= recorded.think_tokens)):
            self.ends = recorded, recorded
        else:
            self.ends = recorded, new.end or ThinkEnd(UNKNOWN, recorded.think_tokens)


class SessionReplay:
    """Replays one recorded session under a policy.

    lost, begun: ids of the process's requests of which reports were lost, and of those that the agent has told of with
    tokens.
    """

    def __init__(self, hello: fleet_pb2.TraceRecord, policy: Policy, lost: set[str], begun: set[str]) -> None:
        self._policy, self.hello, self._lost, self._begun = policy, hello, lost, begun
        self.session = Session(hello.session_id, hello.up.hello, hello.time.ToDatetime(UTC), parts=STREAM_PARTS)
        # What the engine has refused are other policies, here and in its answers to settings.
        self.session.delivery.refused.clear()
        self.live: dict[int, LiveRequest] = {}
        self.ended: list[LiveRequest] = []
        self.left_out: Counter[str] = Counter()
        # Slots of requests that lived when the recording of the session began, as far as reports tell; None once a
        # snapshot has listed all, and if the recording has the whole session.
        self._older: set[int] | None = set() if hello.joined_late else None
        # Outcomes of this run's decisions, which the next report brings.
        self._due: list[agent_pb2.DecisionOutcome] = []
        # By recorded id of a probe: its placement, and the id of this run's probe that has its sample.
        self._placements: dict[int, int] = {}
        self._same: dict[int, int] = {}
        # This run's nonces by field and recorded nonce, and its newest nonce of settings.
        self._nonces: dict[tuple[str, int], int] = {}
        self._nonce = 0
        # The newest event, and the recorded responses to it so far, which a trace has after the event.
        self.event: fleet_pb2.TraceRecord | None = None
        self.responses: Responses = []

    def play(self, following: fleet_pb2.TraceRecord | None) -> None:
        """Take the newest event, now that all responses to it are known, and keep the following one."""
        if self.event is not None:
            self.replay_event(self.event, self.responses)
        self.event, self.responses = following, []

    def replay_event(self, event: fleet_pb2.TraceRecord, recorded: Responses) -> None:
        """Give one recorded event to the session. recorded: the recorded session's responses to the event."""
        new = self._responses(event, recorded)
        for response in recorded:
            self._note(response.directives, lambda request: request.recorded)
            self._placements |= {probe.decision_id: probe.placement for probe in response.directives.probes}
        for response in new:
            self._note(response.directives, lambda request: request.new)
            self._carry_out(response.directives)
        for closed in event.up.step.closed:
            if (request := self.live.pop(closed.slot, None)) is not None:
                self._close(request, closed)

    def _responses(self, event: fleet_pb2.TraceRecord, recorded: Responses) -> Responses:
        """Return this run's responses to an event."""
        session, now = self.session, event.time.ToDatetime(UTC)
        if event.HasField("policy"):
            sent = session.on_policy(event.policy.revision, self._policy)
            self._nonce = sent[0].settings.nonce if sent else self._nonce
            self._nonces |= {("settings", r.settings.nonce): self._nonce for r in recorded if r.HasField("settings")}
            if not sent or any(r.HasField("settings") for r in recorded):
                return []
            # The agent lacked what the recorded policy needs, or got the policy before the recording began, so that the
            # trace has no answer.
            status = agent_pb2.SettingsStatus(nonce=self._nonce, revision=event.policy.revision)
            return session.on_message(agent_pb2.ConnectRequest(settings_status=status), now)
        if event.down.HasField("freeze"):
            # A trace has no record of the given freezes, so they are derived from the message to the agent.
            (freeze,) = session.on_freezes(given_freezes(event), now)
            self._nonces["freeze", event.down.freeze.nonce] = freeze.freeze.nonce
        elif event.HasField("end_thinking"):
            ended = session.on_end_thinking(event.end_thinking.request_id, "", now)
            return ended.responses if ended is not None else []
        elif event.HasField("up"):
            return session.on_message(self._translated(event.up), now)
        else:
            session.on_record(event)
        return []

    def _translated(self, up: agent_pb2.ConnectRequest) -> agent_pb2.ConnectRequest:
        """Return a recorded message as the agent would have sent it to this run."""
        message, report = deepcopy(up), up.step
        if up.HasField("settings_status"):
            message.settings_status.nonce = self._nonces.get(("settings", up.settings_status.nonce), self._nonce)
            message.settings_status.ClearField("error")
        elif up.HasField("freeze_status"):
            message.freeze_status.nonce = self._nonces.get(("freeze", up.freeze_status.nonce), 0)
        elif up.HasField("snapshot"):
            self.lose_live()
            # Those that the snapshot lists are counted by their ids.
            listed = {opened.slot for opened in up.snapshot.requests}
            self.left_out[BEGUN] -= len((self._older or set()) & listed)
            self._older = None
            self._open(up.snapshot.requests)
        elif up.HasField("step"):
            self._open(report.opened)
            if self._older is not None:
                self._older = self._find_older(report, self._older)
            self._count(report.tokens)
            # Entries with the id 0 belong to no decision of this run, and the session leaves them out.
            message.step.probes.decision_id[:] = [self._probe(report.probes, n) for n in range(len(report.probes.slot))]
            for outcome in message.step.outcomes:
                outcome.decision_id = self._same.pop(outcome.decision_id, 0)
            outcomes, self._due = [*self._due, *message.step.outcomes], []
            if report.merged.outcomes:
                message.step.merged.outcomes[0] += len(outcomes) - len(report.outcomes)
            message.step.ClearField("outcomes")
            message.step.outcomes.extend(outcomes)
        return message

    def _find_older(self, report: agent_pb2.StepReport, known: set[int]) -> set[int]:
        """Count the requests of a report that the trace has not opened; return their slots with those that are known,
        without those that the report closes."""
        closed = {request.slot for request in report.closed}
        opened = {*self.live, *(request.slot for request in report.opened)}
        older = {slot for slot in {*report.tokens.slot, *closed} - opened if not self.session.table.holds(slot)}
        self.left_out[BEGUN] += len(older - known)
        return (known | older) - closed

    def lose_live(self) -> None:
        """Note that the reports about the live requests end here, as the trace goes on with a snapshot."""
        self._lost.update(request.opened.request_id for request in self.live.values())
        self.live = {}

    def _open(self, requests: Iterable[agent_pb2.RequestOpened]) -> None:
        for opened in requests:
            self.live.pop(opened.slot, None)
            if is_under_way(opened):
                self._begun.add(opened.request_id)
            else:
                # A request that has waited all the time has no report to lose.
                self._lost.discard(opened.request_id)
                self.live[opened.slot] = LiveRequest(opened)

    def _count(self, tokens: agent_pb2.TokenColumns) -> None:
        """Note limits and ends of thinking, with thinking tokens counted as in the request table."""
        table = self.session.table
        thinking = {slot: int(table.think_tokens[slot]) if table.holds(slot) else 0 for slot in self.live}
        for slot, phase, flags in zip(tokens.slot, tokens.phase, tokens.flags, strict=False):
            if (request := self.live.get(slot)) is None or request.ends is not None:
                continue
            if phase == THINK:
                back = 0 if flags & FLAG_FROM_OUTPUT else flags >> TAKE_BACK_SHIFT
                thinking[slot] += (not flags & FLAG_MARKER) - back
                for course in (request.recorded, request.new):
                    course.pass_limits(request.opened, thinking[slot])
            if flags & FLAG_END:
                force = request.recorded.end.reason if request.recorded.end is not None else UNKNOWN
                reason = by_limit(flags) or (force if flags & FLAG_FORCED else NATURAL)
                request.end(ThinkEnd(reason, thinking[slot]))

    def _probe(self, recorded: agent_pb2.ProbeColumns, row: int) -> int:
        """Return the id of this run's probe that a recorded sample fits, 0 for none."""
        request, recorded_id = self.live.get(recorded.slot[row]), recorded.decision_id[row]
        placement = self._placements.pop(recorded_id, ANYWHERE)
        for asked in request.asked if request is not None else ():
            # The end of a paragraph is the end of a sentence, too, and has the larger number.
            fits = asked[0].placement <= max(ANYWHERE, placement)
            if fits and recorded.think_tokens[row] >= asked[1]:
                request.asked.remove(asked)  # type: ignore[union-attr]
                self._same[recorded_id] = asked[0].decision_id
                return int(asked[0].decision_id)
        return 0

    def _note(self, directives: agent_pb2.Directives, side: Callable[[LiveRequest], Course]) -> None:
        """Note decisions that end or limit thinking; those in shadow have no effect."""
        tokens = self.session.table.think_tokens
        for force in directives.forces:
            if (request := self.live.get(force.slot)) is not None and not force.shadow and side(request).end is None:
                side(request).end = ThinkEnd(reason_name(force.reason), int(tokens[force.slot]))
        for cap in directives.caps:
            if (request := self.live.get(cap.slot)) is not None:
                course, most = side(request), cap.max_think_tokens if cap.HasField("max_think_tokens") else None
                course.cap, course.reserve_tokens = (None, 0) if cap.shadow else (most, cap.answer_reserve_tokens)
                course.since = int(tokens[cap.slot])

    def _carry_out(self, directives: agent_pb2.Directives) -> None:
        """Carry out decisions of this run, as far as an agent would report it. The request goes on as recorded, so a
        handover has no outcome."""
        for probe in directives.probes:
            if (request := self.live.get(probe.slot)) is not None:
                request.asked.append((probe, int(self.session.table.think_tokens[probe.slot])))
        decisions: list[Any] = [*directives.forces, *directives.caps, *directives.tiers]
        for decision in decisions + ([directives.plan] if directives.HasField("plan") else []):
            shadow = getattr(decision, "shadow", False)
            outcome = agent_pb2.OUTCOME_SHADOWED if shadow else agent_pb2.OUTCOME_APPLIED
            self._due.append(agent_pb2.DecisionOutcome(decision_id=decision.decision_id, outcome=outcome))

    def _close(self, request: LiveRequest, closed: agent_pb2.RequestClosed) -> None:
        self._due += [agent_pb2.DecisionOutcome(decision_id=p.decision_id, outcome=GONE) for p, _ in request.asked]
        tokens = int(self.session.table.think_tokens[closed.slot])
        if request.ends is None and not (tokens and closed.reason in FINISHED):
            self.left_out["aborted while thinking" if tokens else "did not think"] += 1
            return
        if request.ends is None:
            request.end(ThinkEnd(UNENDED, tokens))
        self.ended.append(request)


def changes(paths: Iterable[Path], policy: Policy) -> dict[str, Any]:
    """Return what a policy would have changed in trace files. Sums of thinking tokens leave out requests that would
    have thought on, and probes are those of requests that finished. Raises FileError, and PolicyError if an extension
    has no capability here."""
    check_extensions(policy, sections(), {})
    replays, left_out, rows = list[SessionReplay](), Counter[str](), list[dict[str, Any]]()
    before = set[tuple[str, str]]()
    for path in paths:
        found, others = _replays(path, policy)
        ended = {(replay.hello.engine_id, request.opened.request_id) for replay in found for request in replay.ended}
        for engine_id, name in sorted(ended & before):
            raise FileError(path, "", f"cannot be used: an earlier trace holds request {name!r} of {engine_id}, too")
        before |= ended
        left_out += others
        replays += found
    for replay in replays:
        left_out += replay.left_out
        for request in replay.ended:
            names = {"request_id": request.opened.request_id, "engine_id": replay.hello.engine_id}
            ends = zip(SIDES, request.ends or (), strict=True)
            rows.append(names | {side: end._asdict() for side, end in ends})
    known = [row for row in rows if row["new"]["reason"] != UNKNOWN]
    return {
        "requests": len(rows),
        "changed": sum(row["recorded"] != row["new"] for row in rows),
        "left_out": dict(sorted(left_out.items())),
        "ends": {side: dict(sorted(Counter(row[side]["reason"] for row in rows).items())) for side in SIDES},
        "think_tokens": {side: sum(row[side]["think_tokens"] for row in known) for side in SIDES},
        "probes_without_sample": sum(len(request.asked) for replay in replays for request in replay.ended),
        "refused": {r.hello.engine_id: r.session.nack_error for r in replays if r.session.nack_error},
        "by_request": rows,
    }


def _replays(path: Path, policy: Policy) -> tuple[list[SessionReplay], Counter[str]]:
    """Replay the sessions in a trace file, and count the requests of which the trace lacks the beginning, a part or the
    end, each once. Raises FileError."""
    replays, number = list[SessionReplay](), 0
    by_session, by_process = dict[str, SessionReplay](), dict[tuple[str, str], SessionReplay]()
    # `lost` and `begun` of SessionReplay by process, because engines may have requests with the same id.
    lost, begun = defaultdict[tuple[str, str], set[str]](set), defaultdict[tuple[str, str], set[str]](set)
    # By engine, the sessions with a record since a process of the engine has begun the newest one.
    heard = defaultdict[str, set[SessionReplay]](set)
    try:
        for number, record in enumerate(read(path)):  # noqa: B007
            if record.up.HasField("hello"):
                process = record.engine_id, record.up.hello.incarnation
                if (broken := by_process.get(process)) is not None:
                    broken.play(None)
                    broken.lose_live()
                replay = SessionReplay(record, policy, lost[process], begun[process])
                by_session[record.session_id] = by_process[process] = replay
                heard[record.engine_id] = {replay}
                replays.append(replay)
            elif (known := by_session.get(record.session_id)) is None:
                raise BadReport("its session has no Hello before it")
            elif record.HasField("down") and not record.down.HasField("freeze"):
                known.responses.append(record.down)
            else:
                known.play(record)
                heard[known.hello.engine_id].add(known)
        for replay in replays:
            replay.play(None)
        for replay in replays:
            if replay not in heard[replay.hello.engine_id]:
                replay.lose_live()
    except (MeridianError, IndexError) as error:
        raise FileError(path, "", f"record {number}: {error}") from error
    under_way = sum(len(replay.live) for replay in replays)
    return replays, Counter(
        {
            "reports were lost": sum(map(len, lost.values())),
            "still under way at the end of the trace": under_way,
            BEGUN: sum(len(ids - lost[process]) for process, ids in begun.items()),
        }
    )
