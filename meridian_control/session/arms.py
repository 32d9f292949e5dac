"""Counts what becomes of treated requests and of the control group, for each set of rules.

A request counts when it closes, so the memory does not grow with the number of requests. All counts are integers or
sums, so that counts of several engines and replicas add up. The module knows neither messages of agents nor time. The
objects belong to one event loop; all sessions of a replica share one `Experiments`.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from meridian.v1 import agent_pb2

from meridian_control.common.enum_names import ENTROPY_REASONS, reason_name
from meridian_control.common.histogram import Histogram, answer_histogram
from meridian_control.decisions.control_group import rule_under_pressure
from meridian_control.decisions.table_columns import NATURAL_END, RULE_END
from meridian_control.policy.drift_schema import SIGNALS, bin_of
from meridian_control.session.think_ends import EMPTY_ANSWER, FINISHED

if TYPE_CHECKING:
    from meridian_control.decisions.request_table import RequestTable
    from meridian_control.policy.drift_schema import Bins
    from meridian_control.policy.model import Policy

# Number of newest experiments whose counts are kept apart.
MAX_EXPERIMENTS = 8
# Sections of the policy that have no effect on when thinking ends, and entries that shorten both groups alike.
UNRELATED = {"kv_memory", "telemetry", "fallback", "disagg", "engine", "budget", "pressure"}
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
    answer_tokens: Histogram = field(default_factory=answer_histogram)

    def closed(self, answer_tokens: int, thought_again: bool, reason: agent_pb2.FinishReason.ValueType) -> None:
        self.ends += 1
        self.aborts += reason == agent_pb2.FINISH_REASON_ABORT
        self.reentries += thought_again
        if not thought_again:
            self.answer_tokens.add_one(answer_tokens)
            self.empty_answers += reason in FINISHED and answer_tokens <= EMPTY_ANSWER

    def add(self, other: Ends) -> None:
        self.ends += other.ends
        self.reentries += other.reentries
        self.empty_answers += other.empty_answers
        self.aborts += other.aborts
        self.answer_tokens += other.answer_tokens


@dataclass
class Experiment:
    """The counts under one set of rules, which came into force with the revision `since_revision`.

    forced_ends: treated requests whose thinking an entropy rule ended first. natural_ends: requests of the control
    group whose thinking the model itself ended first, after a rule would have. The fields from `shadow_saved_tokens` to
    `unjudged` count requests of the control group. `Savings` in fleet.proto defines all counts.
    """

    rules: str = ""
    since_revision: int = 0
    max_loss: float = 1.0
    treated: Arm = field(default_factory=Arm)
    control: Arm = field(default_factory=Arm)
    forced_ends: Ends = field(default_factory=Ends)
    natural_ends: Ends = field(default_factory=Ends)
    shadow_saved_tokens: int = 0
    judged: int = 0
    judged_stops: int = 0
    harmful: int = 0
    unjudged: int = 0
    # By signal: the policy's description of the calibrated requests, and the number of live requests in each bin.
    references: dict[str, Bins] = field(default_factory=dict)
    samples: dict[str, list[int]] = field(default_factory=dict)

    def closed(
        self,
        table: RequestTable,
        slot: int,
        reason: agent_pb2.FinishReason.ValueType,
        *,
        handed_over: bool = False,
    ) -> None:
        """Count a request that closes, unless it did not think or did not begin under these rules.

        handed_over: whether another engine gives the answer, so that nothing about the answer is counted.
        """
        think_tokens, answer_tokens = int(table.think_tokens[slot]), int(table.output_tokens[slot])
        if not (table.counted[slot] and think_tokens):
            return
        is_control, has_answer = bool(table.control[slot]), _has_answer(table, slot, reason)
        arm = self.control if is_control else self.treated
        arm.requests += 1
        arm.think_tokens += think_tokens
        arm.think_tokens_squares += float(think_tokens) ** 2
        arm.stopped += table.stop_tokens[slot] >= 0 if is_control else _ended_by_entropy_rule(table, slot)
        if has_answer and not handed_over:
            arm.answers += 1
            arm.answer_tokens += answer_tokens
            arm.answer_tokens_squares += float(answer_tokens) ** 2
        thought_again = _thought_again(table, slot)
        arm.reentries += thought_again
        arm.aborts += reason == agent_pb2.FINISH_REASON_ABORT
        arm.lengths += reason == agent_pb2.FINISH_REASON_LENGTH
        if is_control:
            self._compare(table, slot, has_answer)
        if handed_over:
            return
        first_end = table.first_end[slot]
        if is_control and first_end == NATURAL_END and table.stop_tokens[slot] >= 0:
            self.natural_ends.closed(answer_tokens, thought_again, reason)
        elif not is_control and first_end == RULE_END:
            self.forced_ends.closed(answer_tokens, thought_again, reason)

    def sampled(self, signal: str, value: float) -> None:
        """Count a request's first value of a signal that a rule could read."""
        self.samples[signal][bin_of(self.references[signal], value)] += 1

    def _compare(self, table: RequestTable, slot: int, has_answer: bool) -> None:
        """Compare a request of the control group with the end that the first rule to fire would have made."""
        stop = int(table.stop_tokens[slot])
        if stop >= 0:
            self.shadow_saved_tokens += max(0, int(table.think_tokens[slot]) - stop)
        # A request is given up because its trial answers change, so a change does not mean harm.
        if not has_answer or table.stop_gives_up[slot]:
            return
        probes = int(table.probes_since_stop[slot])
        # Agents of the first version do not count the probes with the same answer.
        if stop >= 0 and (probes < 1 or not table.same_answer[slot]):
            self.unjudged += 1
            return
        self.judged += 1
        self.judged_stops += stop >= 0
        # The newest `same_answer` probes agree; the first probe at or after the stop must be one of them.
        stays = probes <= table.same_answer[slot] and not table.stop_is_empty[slot]
        self.harmful += stop >= 0 and not stays

    def add(self, other: Experiment) -> None:
        self.treated.add(other.treated)
        self.control.add(other.control)
        self.forced_ends.add(other.forced_ends)
        self.natural_ends.add(other.natural_ends)
        for name in ("shadow_saved_tokens", "judged", "judged_stops", "harmful", "unjudged"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Experiments:
    """The experiments of one replica, oldest first. A change of the rules begins a new experiment."""

    def __init__(self) -> None:
        self._kept: deque[Experiment] = deque()
        self._dropped = Experiment()

    def of(self, revision: int, policy: Policy) -> Experiment:
        """Return the experiment of a revision: the newest that is not newer, if its rules are the same, else a new one.

        Engines may still apply an older revision while others have a newer one, so the order of calls does not matter.
        """
        rules = rules_of(policy)
        older = [kept for kept in self._kept if kept.since_revision <= revision]
        if older and older[-1].rules == rules:
            return older[-1]
        made = Experiment(rules, revision, policy.entropy.max_loss)
        for signal in SIGNALS:
            if bins := getattr(policy.entropy, f"{signal}_reference"):
                made.references[signal], made.samples[signal] = bins, [0] * len(bins)
        self._kept.insert(len(older), made)
        if len(self._kept) > MAX_EXPERIMENTS:
            # Sessions under older rules may go on counting in a dropped experiment, whose later counts are lost.
            self._dropped.add(self._kept.popleft())
        return made

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
    """Return a fingerprint of the policy's sections that decide when thinking ends, and of whether pressure puts the
    entropy rules in force."""
    text = policy.model_dump_json(exclude=UNRELATED) + "under pressure" * rule_under_pressure(policy.pressure)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _has_answer(table: RequestTable, slot: int, reason: agent_pb2.FinishReason.ValueType) -> bool:
    """Whether the request finished by itself or by its length, after its thinking had ended."""
    return reason in FINISHED and bool(table.ended[slot]) and table.phase[slot] != agent_pb2.PHASE_THINK


def _thought_again(table: RequestTable, slot: int) -> bool:
    """Whether the request thought again after the end of its thinking; this second thinking may have no end."""
    return bool(table.reentered[slot] or (table.ended[slot] and table.phase[slot] == agent_pb2.PHASE_THINK))


def _ended_by_entropy_rule(table: RequestTable, slot: int) -> bool:
    """Whether an entropy rule made the first or the newest end of the request's thinking."""
    if table.first_end[slot] == RULE_END:
        return True
    decided = reason_name(int(table.end_decided[slot]))
    return bool(table.forced[slot]) and decided in ENTROPY_REASONS
