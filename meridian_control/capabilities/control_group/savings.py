"""The counts of treated requests and of the control group as messages, and the estimates that follow from the counts.

Estimates are computed from sums over all replicas. The functions are pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from meridian.v1 import fleet_pb2

from meridian_control.capabilities.control_group.experiments import add_counts, kind_of, rules_of
from meridian_control.capabilities.control_group.requests import answers_alike
from meridian_control.common.drift_bins import drift_bins
from meridian_control.common.harm_words import DRIFT, HARM
from meridian_control.common.inference import Sums, binomial_lower, binomial_upper, difference, saved_ratio
from meridian_control.policy.drift_schema import SIGNALS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meridian_control.capabilities.control_group.experiments import Experiments
    from meridian_control.common.inference import Estimate
    from meridian_control.policy.model import Policy
    from meridian_control.policy.store import StoredRevision

# Author of the policy revisions by which the control plane itself withdraws a kind of shortening.
WITHDRAWER = "meridian-harm-guard"
# These words stand in the reason of a revision whose cause is DRIFT.
DRIFTED = " has left the distribution that the rules of revision "
# Confidence of the intervals and bounds of saving and harm; smallest number of requests on each side for a comparison.
CONFIDENCE, MIN_REQUESTS = 0.95, 30
ALIKE = "answers begin alike, so that their changes are not seen: set the model's eat_answer_prefix"
# Fields about a withdrawal; and those that only the replica that leads fills in.
WITHDRAWN = "withdrawn_revision", "withdrawn_reason", "withdrawn_cause"
EVIDENCE: tuple[Literal["evidence_ratio"], Literal["drift_evidence_ratio"]] = ("evidence_ratio", "drift_evidence_ratio")


def withdrawn(policy: StoredRevision | None) -> StoredRevision | None:
    """Return the revision if the control plane itself has stored it to withdraw a kind of shortening."""
    return policy if policy is not None and policy.author == WITHDRAWER else None


def cause_of(withdrawal: StoredRevision) -> str:
    """Return HARM or DRIFT. The reason says it of a revision that was stored before revisions had a cause."""
    return withdrawal.cause or (DRIFT if DRIFTED in withdrawal.reason else HARM)


def messages(experiments: Experiments, policy: StoredRevision | None) -> list[fleet_pb2.Savings]:
    """Return the counts of the newest experiment of each set of rules, without estimates."""
    in_force = rules_of(policy.policy) if policy is not None else ""
    told = [kept.message() for kept in experiments.newest()]
    for savings in told:
        savings.in_force = savings.rules == in_force
    return [
        savings
        for savings in told
        if savings.in_force
        or any(arm.requests for arm in (savings.treated, savings.control))
        # Both arms count later than all else.
        or any((savings.judged, savings.unjudged, savings.forced_ends.ends))
        or any(sample_bin.seen for bins in drift_bins(savings).values() for sample_bin in bins)
    ]


def harming(
    savings: Iterable[fleet_pb2.Savings], policies: Iterable[Policy]
) -> list[tuple[fleet_pb2.Savings, fleet_pb2.ShorteningHarm]]:
    """Return the kinds of shortening whose harm is above what the policy allows, as the sequential test shows. Bounds
    that are looked at again and again would exceed it by chance. policies: those that are in force on engines."""
    rules = {rules_of(policy) for policy in policies}
    in_force = (whole for whole in savings if whole.rules in rules)
    return [(whole, harm) for whole in in_force for harm in whole.kinds if harm.evidence_ratio >= 1]


def evidence_of(savings: fleet_pb2.Savings) -> fleet_pb2.Savings:
    """Return a message with nothing but the evidence."""
    evidence = fleet_pb2.Savings()
    for name in EVIDENCE:
        if savings.HasField(name):
            setattr(evidence, name, getattr(savings, name))
    for harm in savings.kinds:
        evidence.kinds.add(kind=harm.kind, name=harm.name, evidence_ratio=harm.evidence_ratio)
    return evidence


def add_evidence(savings: fleet_pb2.Savings, evidence: fleet_pb2.Savings) -> None:
    """Fill in the evidence, as `evidence_of` returns it."""
    for name in EVIDENCE:
        if evidence.HasField(name):
            setattr(savings, name, getattr(evidence, name))
    known = {kind_of(harm): harm.evidence_ratio for harm in evidence.kinds}
    for harm in savings.kinds:
        if kind_of(harm) in known:
            harm.evidence_ratio = known[kind_of(harm)]


def merged(answers: Iterable[fleet_pb2.GetSavingsResponse]) -> fleet_pb2.GetSavingsResponse:
    """Return the sums over the replicas' answers for each set of rules, with estimates; the newest rules first."""
    response, by_rules = fleet_pb2.GetSavingsResponse(), dict[str, fleet_pb2.Savings]()
    for answer in answers:
        if answer.withdrawn_revision > response.withdrawn_revision:
            for name in WITHDRAWN:
                setattr(response, name, getattr(answer, name))
        for part in answer.savings:
            if (whole := by_rules.get(part.rules)) is None:
                by_rules[part.rules] = whole = fleet_pb2.Savings()
                whole.CopyFrom(part)
            else:
                _add(whole, part)
    for whole in by_rules.values():
        estimate(whole)
    response.savings.extend(sorted(by_rules.values(), key=lambda s: (not s.in_force, -s.since_revision)))
    return response


def _add(whole: fleet_pb2.Savings, part: fleet_pb2.Savings) -> None:
    whole.since_revision = min(whole.since_revision, part.since_revision)
    whole.in_force |= part.in_force
    add_counts(whole, part)
    for signal in SIGNALS:
        name = f"{signal}_samples"
        for here, there in zip(getattr(whole, name), getattr(part, name), strict=False):
            here.seen += there.seen
    for name in EVIDENCE:
        if part.HasField(name):
            setattr(whole, name, getattr(part, name))
    whole.not_measured = whole.not_measured or part.not_measured


def estimate(counts: fleet_pb2.Savings) -> None:
    """Fill in the estimates of the saving and of the harm that the counts allow."""
    treated, control = counts.treated, counts.control
    if min(treated.requests, control.requests) >= MIN_REQUESTS:
        mine, theirs = (Sums(a.requests, a.think_tokens, a.think_tokens_squares) for a in (treated, control))
        _set_range(counts.saved_tokens, difference(theirs, mine, CONFIDENCE))
        _set_range(counts.saved_ratio, saved_ratio(mine, theirs, CONFIDENCE))
    if answers_alike(counts.judged_stops - counts.alike_stops, counts.judged_stops):
        counts.not_measured = counts.not_measured or ALIKE
    judged: tuple[fleet_pb2.Savings | fleet_pb2.ShorteningHarm, ...] = (counts, *counts.kinds)
    for row in judged:
        if row.judged and row.unjudged <= row.judged_stops and not counts.not_measured:
            harm = row.harm_ratio
            harm.value = row.harmful / row.judged
            harm.low = binomial_lower(row.harmful, row.judged, CONFIDENCE)
            harm.high = binomial_upper(row.harmful, row.judged, CONFIDENCE)


def _set_range(message: fleet_pb2.Range, estimated: Estimate | None) -> None:
    """Fill in an estimate; the message stays absent if there is none."""
    if estimated is not None:
        message.value, message.low, message.high = estimated.value, estimated.low, estimated.high
        message.SetInParent()
