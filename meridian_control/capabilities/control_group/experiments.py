"""Counts what becomes of treated requests and of the control group, for each set of rules, by kind of shortening.

A request counts when it closes, so the memory does not grow with the number of requests. All counts are integers or
sums, so that counts of several engines and replicas add up. The module knows neither messages of agents nor time. The
objects belong to one event loop; all sessions of a replica share one `Experiments`.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from meridian.v1 import agent_pb2

from meridian_control.common.histogram import Histogram, answer_histogram
from meridian_control.common.table_columns import NATURAL_END
from meridian_control.engine.think_ends import CUT, EMPTY_ANSWER, FINISHED
from meridian_control.policy.drift_schema import SIGNALS, bin_of
from meridian_control.policy.shortening_kinds import Kind, kinds_of, not_measured

if TYPE_CHECKING:
    from meridian_control.capabilities.control_group.requests import ControlRequest
    from meridian_control.engine.request_table import RequestTable
    from meridian_control.policy.drift_schema import Bins
    from meridian_control.policy.model import Policy
    from meridian_control.policy.shortening_schema import StagedEntry

# Number of newest experiments whose counts are kept apart.
MAX_EXPERIMENTS = 8
# Sections of the policy that have no effect on when thinking ends. Of budgets and pressure only entries in force have.
UNRELATED = {"kv_memory", "telemetry", "fallback", "disagg", "engine", "budget", "pressure", "preemption"}
TREATED, CONTROL = "treated", "control"


@dataclass
class Arm:
    """Counts of closed requests that thought; `ArmCounts` in fleet.proto defines each field."""

    requests: int = 0
    think_tokens: int = 0
    think_tokens_squares: float = 0.0
    stopped: int = 0
    answers: int = 0
    answer_tokens: int = 0
    answer_tokens_squares: float = 0.0
    reentries: int = 0
    aborts: int = 0
    lengths: int = 0

    def add(self, other: Arm) -> None:
        for name, count in vars(other).items():
            setattr(self, name, getattr(self, name) + count)


@dataclass
class Ends:
    """Counts of what became of closed requests after the first end of their thinking.

    `EndCounts` in fleet.proto defines each field.
    """

    ends: int = 0
    reentries: int = 0
    empty_answers: int = 0
    aborts: int = 0
    lengths: int = 0
    answer_tokens: Histogram = field(default_factory=answer_histogram)

    def closed(self, answer_tokens: int, thought_again: bool, reason: agent_pb2.FinishReason.ValueType) -> None:
        self.ends += 1
        self.aborts += reason == agent_pb2.FINISH_REASON_ABORT
        self.lengths += reason in CUT
        self.reentries += thought_again
        if not thought_again:
            self.answer_tokens.add_one(answer_tokens)
            self.empty_answers += reason in FINISHED and answer_tokens <= EMPTY_ANSWER

    def add(self, other: Ends) -> None:
        self.ends += other.ends
        self.reentries += other.reentries
        self.empty_answers += other.empty_answers
        self.aborts += other.aborts
        self.lengths += other.lengths
        self.answer_tokens += other.answer_tokens


@dataclass
class Judged:
    """Counts of requests of the control group by what shortening would have done to their answer, and what became of
    requests after the first end of their thinking. `Savings` and `ShorteningHarm` in fleet.proto define all counts.

    forced_ends: treated requests whose thinking shortening ended first. natural_ends: requests of the control group
    whose thinking the model itself ended first, after shortening would have.
    """

    judged: int = 0
    judged_stops: int = 0
    harmful: int = 0
    unjudged: int = 0
    forced_ends: Ends = field(default_factory=Ends)
    natural_ends: Ends = field(default_factory=Ends)

    def add(self, other: Judged) -> None:
        for name in VERDICTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.forced_ends.add(other.forced_ends)
        self.natural_ends.add(other.natural_ends)


VERDICTS = ("judged", "judged_stops", "harmful", "unjudged")


@dataclass
class Experiment(Judged):
    """The counts under one set of rules, which came into force with the revision `since_revision`.

    kinds: the counts of each kind of shortening. not_measured: why harm cannot be measured under the rules.
    """

    rules: str = ""
    since_revision: int = 0
    max_loss: float = 1.0
    treated: Arm = field(default_factory=Arm)
    control: Arm = field(default_factory=Arm)
    shadow_saved_tokens: int = 0
    alike_stops: int = 0
    kinds: defaultdict[Kind, Judged] = field(default_factory=lambda: defaultdict(Judged))
    not_measured: str = ""
    # By signal: the policy's description of the calibrated requests, and the number of live requests in each bin.
    references: dict[str, Bins] = field(default_factory=dict)
    samples: dict[str, list[int]] = field(default_factory=dict)

    def closed(
        self,
        table: RequestTable,
        slot: int,
        reason: agent_pb2.FinishReason.ValueType,
        request: ControlRequest | None,
        ended_by: Kind | None,
        *,
        handed_over: bool = False,
    ) -> list[str]:
        """Count a request that closes, unless it did not think or did not begin under these rules. Return the names
        under which its engine counts it, as `Engine.control_group` in fleet.proto has them.

        request: state of a request of the control group, None for a treated request. ended_by: the kind of shortening
        that ended the thinking of a treated request first. handed_over: whether another engine gives the answer, so
        that nothing about the answer is counted.
        """
        think_tokens, answer_tokens = int(table.think_tokens[slot]), int(table.output_tokens[slot])
        if not (table.counted[slot] and think_tokens):
            return []
        has_answer = _has_answer(table, slot, reason)
        arm = self.control if request is not None else self.treated
        arm.requests += 1
        arm.think_tokens += think_tokens
        arm.think_tokens_squares += float(think_tokens) ** 2
        arm.stopped += request.stopped if request is not None else ended_by is not None
        if has_answer and not handed_over:
            arm.answers += 1
            arm.answer_tokens += answer_tokens
            arm.answer_tokens_squares += float(answer_tokens) ** 2
        thought_again = _thought_again(table, slot)
        arm.reentries += thought_again
        arm.aborts += reason == agent_pb2.FINISH_REASON_ABORT
        arm.lengths += reason in CUT
        if request is not None:
            verdicts = self._compare(request, think_tokens, has_answer)
            natural = request.stopped and table.first_end[slot] == NATURAL_END
            kind, side = (request.stopped_by if natural else None), "natural_ends"
        else:
            verdicts = ["shortened"] if ended_by is not None else []
            kind, side = ended_by, "forced_ends"
        if kind is not None and not handed_over:
            for counts in (self, self.kinds[kind]):
                getattr(counts, side).closed(answer_tokens, thought_again, reason)
        return verdicts

    def sampled(self, signal: str, value: float) -> None:
        """Count a request's first value of a signal that a rule could read."""
        self.samples[signal][bin_of(self.references[signal], value)] += 1

    def _compare(self, request: ControlRequest, think_tokens: int, has_answer: bool) -> list[str]:
        """Compare a request of the control group with the first end that shortening would have made."""
        if request.stopped:
            self.shadow_saved_tokens += max(0, think_tokens - request.stop_tokens)
        # A request is given up because its trial answers change, so a change does not mean harm.
        if not has_answer or request.gives_up:
            return []
        stopped_by = request.stopped_by if request.stopped else None
        if stopped_by is not None and not request.is_judged(think_tokens):
            self.unjudged += 1
            self.kinds[stopped_by].unjudged += 1
            return ["unjudged"]
        for counts in (self, *(self.kinds[kind] for kind in request.kinds)):
            counts.judged += 1
        is_harmful = stopped_by is not None and request.is_harmed
        self.alike_stops += stopped_by is not None and request.newest is not None and request.newest.is_alike
        for counts in (self, self.kinds[stopped_by]) if stopped_by is not None else ():
            counts.judged_stops += 1
            counts.harmful += is_harmful
        return ["judged", "harmful"] if is_harmful else ["judged"]

    def add(self, other: Experiment) -> None:  # type: ignore[override]
        super().add(other)
        self.treated.add(other.treated)
        self.control.add(other.control)
        self.shadow_saved_tokens += other.shadow_saved_tokens
        self.alike_stops += other.alike_stops
        for kind, counts in other.kinds.items():
            self.kinds[kind].add(counts)


class Experiments:
    """The experiments of one replica, oldest first. A change of the rules begins a new experiment."""

    def __init__(self) -> None:
        self._kept: deque[Experiment] = deque()
        self._dropped = Experiment()

    def experiment_of(self, revision: int, policy: Policy) -> Experiment:
        """Return the experiment of a revision: the newest that is not newer, if its rules are the same, else a new one.

        Engines may still apply an older revision while others have a newer one, so the order of calls does not matter.
        """
        rules = rules_of(policy)
        older = [kept for kept in self._kept if kept.since_revision <= revision]
        if older and older[-1].rules == rules:
            return older[-1]
        experiment = Experiment(rules=rules, since_revision=revision, max_loss=policy.entropy.max_loss)
        experiment.not_measured = not_measured(policy)
        for kind in kinds_of(policy):
            experiment.kinds[kind] = Judged()
        for signal in SIGNALS:
            if bins := getattr(policy.entropy, f"{signal}_reference"):
                experiment.references[signal], experiment.samples[signal] = bins, [0] * len(bins)
        self._kept.insert(len(older), experiment)
        if len(self._kept) > MAX_EXPERIMENTS:
            # Sessions under older rules may go on counting in a dropped experiment, whose later counts are lost.
            self._dropped.add(self._kept.popleft())
        return experiment

    def newest(self) -> list[Experiment]:
        """Return the newest experiment of each set of rules, the newest first."""
        by_rules = {kept.rules: kept for kept in self._kept}
        return [kept for kept in reversed(self._kept) if by_rules[kept.rules] is kept]

    def total(self) -> Experiment:
        """Return the sums over all experiments, which never decrease."""
        total = Experiment()
        for experiment in (self._dropped, *self._kept):
            total.add(experiment)
        return total


def rules_of(policy: Policy) -> str:
    """Return a fingerprint of all in the policy that decides when thinking ends."""
    text = policy.model_dump_json(exclude=UNRELATED)
    entries: tuple[StagedEntry, ...] = (*policy.budget, *policy.pressure)
    text += "".join(entry.model_dump_json() for entry in entries if not entry.shadow)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _has_answer(table: RequestTable, slot: int, reason: agent_pb2.FinishReason.ValueType) -> bool:
    """Whether the request finished by itself or by its length, after its thinking had ended."""
    return reason in FINISHED and bool(table.ended[slot]) and table.phase[slot] != agent_pb2.PHASE_THINK


def _thought_again(table: RequestTable, slot: int) -> bool:
    """Whether the request thought again after the end of its thinking; this second thinking may have no end."""
    return bool(table.reentered[slot] or (table.ended[slot] and table.phase[slot] == agent_pb2.PHASE_THINK))
