"""Counts what becomes of treated requests and of the control group, for each set of rules, by kind of shortening.

A request counts when it closes, so the memory does not grow with the number of requests; what `ArmCounts` has counts
with the request's cohort. All counts are integers or sums, so that counts of several engines and replicas add up. The
module knows neither messages of agents nor time. The objects belong to one event loop; all sessions of a replica share
one `Experiments`.
"""

from __future__ import annotations

import hashlib
from collections import deque
from typing import TYPE_CHECKING, Any

from meridian.v1 import agent_pb2, fleet_pb2

from meridian_control.capabilities.control_group.cohorts import Cohorts
from meridian_control.capabilities.control_group.going_on import stop_tokens
from meridian_control.common.table_columns import NATURAL_END
from meridian_control.engine.think_ends import CUT, EMPTY_ANSWER, FINISHED
from meridian_control.journal.request_ids import is_later_choice
from meridian_control.policy.drift_schema import SIGNALS, bin_of
from meridian_control.policy.shortening_kinds import Kind, kinds_of, not_measured

if TYPE_CHECKING:
    from collections.abc import Iterable

    from google.protobuf.message import Message

    from meridian_control.capabilities.control_group.cohorts import Cohort
    from meridian_control.capabilities.control_group.going_on import GoingOn
    from meridian_control.capabilities.control_group.requests import ControlRequest
    from meridian_control.engine.request_table import RequestTable
    from meridian_control.policy.drift_schema import Bins
    from meridian_control.policy.model import Policy
    from meridian_control.policy.shortening_schema import StagedEntry

    _Counts = fleet_pb2.Savings | fleet_pb2.ShorteningHarm

# Number of newest experiments whose counts are kept apart.
MAX_EXPERIMENTS = 8
# Sections of the policy that have no effect on when thinking ends. Of budgets and pressure only entries in force have.
UNRELATED = {"kv_memory", "telemetry", "fallback", "disagg", "engine", "budget", "pressure", "preemption"}
# Counts that add up: of requests of the control group by what shortening would have done to their answer, all of
# `Savings`, of an arm, and of ends.
VERDICTS = ("judged", "judged_stops", "harmful", "unjudged")
COUNTS = ("alike_stops", *VERDICTS)
ARM_COUNTS = tuple(field.name for field in fleet_pb2.ArmCounts.DESCRIPTOR.fields)
END_COUNTS = tuple(field.name for field in fleet_pb2.EndCounts.DESCRIPTOR.fields)


class KindCounts(dict[Kind, fleet_pb2.ShorteningHarm]):
    """The counts of each kind of shortening; a kind that has none yet gets zeros."""

    def __missing__(self, kind: Kind) -> fleet_pb2.ShorteningHarm:
        self[kind] = made = fleet_pb2.ShorteningHarm(
            kind=kind.kind, name=kind.name, forced_ends=fleet_pb2.EndCounts(), natural_ends=fleet_pb2.EndCounts()
        )
        return made


class Experiment:
    """The counts under one set of rules, which came into force with the revision `since_revision`.

    counts: as fleet.proto defines them, without `kinds`, samples and estimates. cohorts: what both arms have counted
    since, until it is complete. kinds: the counts of each kind of shortening.
    """

    def __init__(self, rules: str = "", since_revision: int = 0, policy: Policy | None = None) -> None:
        self.counts = fleet_pb2.Savings(
            rules=rules,
            since_revision=since_revision,
            treated=fleet_pb2.ArmCounts(),
            control=fleet_pb2.ArmCounts(),
            forced_ends=fleet_pb2.EndCounts(),
            natural_ends=fleet_pb2.EndCounts(),
        )
        self.cohorts = Cohorts(self.counts, add_arms)
        self.kinds = KindCounts()
        # By signal: the policy's description of the calibrated requests, and the number of live requests in each bin.
        self.references: dict[str, Bins] = {}
        self.samples: dict[str, list[int]] = {}
        if policy is None:
            return
        self.counts.max_loss, self.counts.not_measured = policy.entropy.max_loss, not_measured(policy)
        for kind in kinds_of(policy):
            self.kinds[kind]
        for signal in SIGNALS:
            if bins := getattr(policy.entropy, f"{signal}_reference"):
                self.references[signal], self.samples[signal] = bins, [0] * len(bins)

    def closed(
        self,
        table: RequestTable,
        slot: int,
        reason: agent_pb2.FinishReason.ValueType,
        request: ControlRequest | None,
        *,
        ended_by: Kind | None,
        cohort: Cohort,
        before: GoingOn | None = None,
        handed_over: bool = False,
    ) -> list[str]:
        """Count a request that closes and began under these rules, unless it did not think. Return the names under
        which its engine counts it, as `Engine.control_group` in fleet.proto has them.

        request: state of a request of the control group, None for a treated request. ended_by: the kind of shortening
        that ended the thinking of a treated request first. cohort: the request's. before: what an earlier stream knew
        of it; then neither its harm nor its end is counted. handed_over: whether another engine gives the answer, so
        that nothing about the answer is counted.
        """
        think_tokens, answer_tokens = int(table.think_tokens[slot]), int(table.output_tokens[slot])
        if not think_tokens:
            return []
        ended, thinks = bool(table.ended[slot]), bool(table.phase[slot] == agent_pb2.PHASE_THINK)
        has_answer = reason in FINISHED and ended and not thinks
        arm = cohort.counts.control if request is not None else cohort.counts.treated
        arm.requests += 1
        arm.think_tokens += think_tokens
        arm.think_tokens_squares += float(think_tokens) ** 2
        would_stop = stop_tokens(request, before)
        arm.stopped += would_stop >= 0 if request is not None else ended_by is not None
        if has_answer and not handed_over:
            arm.answers += 1
            arm.answer_tokens += answer_tokens
        # The second thinking may have no end.
        thought_again = bool(table.reentered[slot]) or (ended and thinks)
        arm.reentries += thought_again
        arm.aborts += reason == agent_pb2.FINISH_REASON_ABORT
        arm.lengths += reason in CUT
        if request is not None:
            opened = table.info[slot]
            alone = opened is None or not is_later_choice(opened.request_id)
            if would_stop >= 0:
                cohort.counts.shadow_saved_tokens += max(0, think_tokens - would_stop)
            verdicts = self._compare(request, think_tokens, judgeable=has_answer and alone) if before is None else []
            natural = request.stopped and table.first_end[slot] == NATURAL_END
            kind, side = (request.stopped_by if natural else None), "natural_ends"
        else:
            verdicts = ["shortened"] if ended_by is not None else []
            kind, side = ended_by, "forced_ends"
        if kind is not None and not handed_over and before is None:
            for counts in (self.counts, self.kinds[kind]):
                _count_end(getattr(counts, side), answer_tokens, thought_again, reason)
        return verdicts

    def sampled(self, signal: str, value: float) -> None:
        """Count a request's first value of a signal that a rule could read."""
        self.samples[signal][bin_of(self.references[signal], value)] += 1

    def _compare(self, request: ControlRequest, think_tokens: int, *, judgeable: bool) -> list[str]:
        """Compare a request of the control group with the first end that shortening would have made.

        judgeable: whether the request has an answer and is the first choice of its prompt. Choices of one prompt are
        harmed together, and the tests and bounds of harm hold for independent requests.
        """
        # A request is given up because its trial answers change, so a change does not mean harm.
        if not judgeable or request.gives_up:
            return []
        stopped_by = request.stopped_by if request.stopped else None
        if stopped_by is not None and not request.is_judged(think_tokens):
            self.counts.unjudged += 1
            self.kinds[stopped_by].unjudged += 1
            return ["unjudged"]
        rows: list[_Counts] = [self.counts, *(self.kinds[kind] for kind in request.kinds)]
        for counts in rows:
            counts.judged += 1
        is_harmful = stopped_by is not None and request.is_harmed
        is_alike = stopped_by is not None and request.newest is not None and request.newest.is_alike
        self.counts.alike_stops += is_alike
        for counts in (self.counts, self.kinds[stopped_by]) if stopped_by is not None else ():
            counts.judged_stops += 1
            counts.harmful += is_harmful
        return ["judged", *["judged_stops"] * (stopped_by is not None), *["harmful"] * is_harmful]

    def message(self) -> fleet_pb2.Savings:
        """Return all counts."""
        told = fleet_pb2.Savings()
        told.CopyFrom(self.counts)
        told.treated.waiting_requests, told.control.waiting_requests = self.cohorts.waiting
        told.kinds.extend(harm for _, harm in sorted(self.kinds.items()))
        references: dict[str, Any] = self.references
        for signal, bins in references.items():
            samples, edge = getattr(told, f"{signal}_samples"), "max_nats" if signal == "eat" else "max_value"
            for reference, seen in zip(bins, self.samples[signal], strict=True):
                samples.add(**{edge: reference.max_value}, calibrated=reference.requests, seen=seen)
        return told


class Experiments:
    """The experiments of one replica, oldest first. A change of the rules begins a new experiment."""

    def __init__(self) -> None:
        self._kept: deque[Experiment] = deque()
        self._dropped = fleet_pb2.Savings()

    def experiment_of(self, revision: int, policy: Policy) -> Experiment:
        """Return the experiment of a revision: the newest that is not newer, if its rules are the same, else a new one.

        Engines may still apply an older revision while others have a newer one, so the order of calls does not matter.
        """
        rules = rules_of(policy)
        older = [kept for kept in self._kept if kept.counts.since_revision <= revision]
        if older and older[-1].counts.rules == rules:
            return older[-1]
        experiment = Experiment(rules, revision, policy)
        self._kept.insert(len(older), experiment)
        if len(self._kept) > MAX_EXPERIMENTS:
            # Sessions under older rules may go on counting in a dropped experiment, whose later counts are lost.
            add_counts(self._dropped, self._kept.popleft().message())
        return experiment

    def newest(self) -> list[Experiment]:
        """Return the newest experiment of each set of rules, the newest first."""
        by_rules = {kept.counts.rules: kept for kept in self._kept}
        return [kept for kept in reversed(self._kept) if by_rules[kept.counts.rules] is kept]

    def total(self) -> fleet_pb2.Savings:
        """Return the sums over all experiments, which never decrease."""
        total = fleet_pb2.Savings()
        for part in (self._dropped, *(kept.message() for kept in self._kept)):
            add_counts(total, part)
        return total


def rules_of(policy: Policy) -> str:
    """Return a fingerprint of all in the policy that decides when thinking ends."""
    text = policy.model_dump_json(exclude=UNRELATED)
    entries: tuple[StagedEntry, ...] = (*policy.budget, *policy.pressure)
    text += "".join(entry.model_dump_json() for entry in entries if not entry.shadow)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def kind_of(harm: fleet_pb2.ShorteningHarm) -> Kind:
    return Kind(harm.kind, harm.name)


def add_counts(whole: fleet_pb2.Savings, part: fleet_pb2.Savings) -> None:
    """Add the counts of another experiment or replica, without those of samples."""
    _add(whole, part, COUNTS)
    add_arms(whole, part)
    _add_ends(whole, part)
    mine = {kind_of(harm): harm for harm in whole.kinds}
    for theirs in part.kinds:
        if (harm := mine.get(kind_of(theirs))) is None:
            whole.kinds.add().CopyFrom(theirs)
        else:
            _add(harm, theirs, VERDICTS)
            _add_ends(harm, theirs)
            if theirs.HasField("evidence_ratio"):
                harm.evidence_ratio = theirs.evidence_ratio


def add_arms(whole: fleet_pb2.Savings, part: fleet_pb2.Savings) -> None:
    """Add the counts of both arms, and the tokens that shortening would have saved in the control group."""
    _add(whole, part, ("shadow_saved_tokens",))
    _add(whole.treated, part.treated, ARM_COUNTS)
    _add(whole.control, part.control, ARM_COUNTS)


def _add(whole: Message, part: Message, names: Iterable[str]) -> None:
    for name in names:
        setattr(whole, name, getattr(whole, name) + getattr(part, name))


def _add_ends(whole: _Counts, part: _Counts) -> None:
    _add(whole.forced_ends, part.forced_ends, END_COUNTS)
    _add(whole.natural_ends, part.natural_ends, END_COUNTS)


def _count_end(
    counts: fleet_pb2.EndCounts, answer_tokens: int, thought_again: bool, reason: agent_pb2.FinishReason.ValueType
) -> None:
    """Count what became of a closed request after the first end of its thinking."""
    counts.ends += 1
    # Most counts stay as they are, and writing to a message takes longer than to look.
    if reason == agent_pb2.FINISH_REASON_ABORT:
        counts.aborts += 1
    elif reason in CUT:
        counts.lengths += 1
    if thought_again:
        counts.reentries += 1
    elif reason in FINISHED and answer_tokens <= EMPTY_ANSWER:
        counts.empty_answers += 1
