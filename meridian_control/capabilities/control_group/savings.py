"""The counts of treated requests and of the control group as messages, and the estimates that follow from the counts.

Estimates are computed from sums over all replicas. The functions are pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from meridian.v1 import fleet_pb2

from meridian_control.capabilities.control_group import spills
from meridian_control.capabilities.control_group.experiments import VERDICTS, rules_of
from meridian_control.capabilities.control_group.requests import answers_alike
from meridian_control.common.inference import Sums, binomial_lower, binomial_upper, difference, saved_ratio
from meridian_control.policy.drift_schema import SIGNALS
from meridian_control.policy.shortening_kinds import Kind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meridian_control.capabilities.control_group.experiments import Experiment, Experiments, Judged
    from meridian_control.policy.model import Policy
    from meridian_control.policy.store import StoredRevision

# Author of the policy revisions by which the control plane itself withdraws a kind of shortening.
WITHDRAWER = "meridian-harm-guard"
# Confidence of the intervals and bounds of saving and harm; smallest number of requests on each side for a comparison.
CONFIDENCE, MIN_REQUESTS = 0.95, 30
# Counts of `Savings` that add up over replicas.
COUNTS = ("shadow_saved_tokens", "alike_stops", *VERDICTS)
ALIKE = "answers begin alike, so that their changes are not seen: set the model's eat_answer_prefix"
ARMS = ("treated", "control")
# Fields that only the replica that leads fills in.
EVIDENCE: tuple[Literal["evidence_ratio"], Literal["drift_evidence_ratio"]] = ("evidence_ratio", "drift_evidence_ratio")


def withdrawn(policy: StoredRevision | None) -> StoredRevision | None:
    """Return the revision if the control plane itself has stored it to withdraw a kind of shortening."""
    return policy if policy is not None and policy.author == WITHDRAWER else None


def messages(experiments: Experiments, policy: StoredRevision | None) -> list[fleet_pb2.Savings]:
    """Return the counts of the newest experiment of each set of rules, without estimates."""
    in_force = rules_of(policy.policy) if policy is not None else ""
    return [
        fleet_pb2.Savings(
            rules=kept.rules,
            since_revision=kept.since_revision,
            in_force=kept.rules == in_force,
            max_loss=kept.max_loss,
            treated=fleet_pb2.ArmCounts(**vars(kept.treated)),
            control=fleet_pb2.ArmCounts(**vars(kept.control)),
            forced_ends=spills.message(kept.forced_ends),
            natural_ends=spills.message(kept.natural_ends),
            kinds=[_harm(kind, counts) for kind, counts in sorted(kept.kinds.items())],
            not_measured=kept.not_measured,
            **{name: getattr(kept, name) for name in COUNTS},
            **_samples(kept),
        )
        for kept in experiments.newest()
        if kept.rules == in_force
        or kept.treated.requests
        or kept.control.requests
        or any(any(seen) for seen in kept.samples.values())
    ]


def _harm(kind: Kind, counts: Judged) -> fleet_pb2.ShorteningHarm:
    return fleet_pb2.ShorteningHarm(
        kind=kind.kind,
        name=kind.name,
        forced_ends=spills.message(counts.forced_ends),
        natural_ends=spills.message(counts.natural_ends),
        **{name: getattr(counts, name) for name in VERDICTS},
    )


def kind_of(harm: fleet_pb2.ShorteningHarm) -> Kind:
    return Kind(harm.kind, harm.name)


def harming(
    savings: Iterable[fleet_pb2.Savings], policies: Iterable[Policy]
) -> list[tuple[fleet_pb2.Savings, fleet_pb2.ShorteningHarm]]:
    """Return the kinds of shortening whose harm is above what the policy allows, beyond doubt. policies: those that are
    in force on engines."""
    rules = {rules_of(policy) for policy in policies}
    return [
        (whole, harm)
        for whole in savings
        if whole.rules in rules
        for harm in whole.kinds
        if harm.evidence_ratio >= 1 or (harm.HasField("harm_ratio") and harm.harm_ratio.low > whole.max_loss)
    ]


def _samples(kept: Experiment) -> dict[str, Any]:
    """Return the fields of Savings with the bins of each signal: the requests of the calibration and the live requests
    in each bin."""
    fields: dict[str, Any] = {}
    for signal in kept.references:
        bins: Any = kept.references[signal]
        seen = zip(bins, kept.samples[signal], strict=True)
        message_type, edge = (
            (fleet_pb2.EatSamples, "max_nats") if signal == "eat" else (fleet_pb2.SignalSamples, "max_value")
        )
        counts = [
            {edge: reference.max_value, "calibrated": reference.requests, "seen": requests}
            for reference, requests in seen
        ]
        fields[f"{signal}_samples"] = [message_type(**values) for values in counts]
    return fields


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
            response.withdrawn_revision, response.withdrawn_reason = answer.withdrawn_revision, answer.withdrawn_reason
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
    for name in COUNTS:
        setattr(whole, name, getattr(whole, name) + getattr(part, name))
    for signal in SIGNALS:
        name = f"{signal}_samples"
        for here, there in zip(getattr(whole, name), getattr(part, name), strict=False):
            here.seen += there.seen
    for name in EVIDENCE:
        if part.HasField(name):
            setattr(whole, name, getattr(part, name))
    for arm in ARMS:
        ours, others = getattr(whole, arm), getattr(part, arm)
        for count in fleet_pb2.ArmCounts.DESCRIPTOR.fields:
            setattr(ours, count.name, getattr(ours, count.name) + getattr(others, count.name))
    spills.add(whole.forced_ends, part.forced_ends)
    spills.add(whole.natural_ends, part.natural_ends)
    whole.not_measured = whole.not_measured or part.not_measured
    mine = {kind_of(harm): harm for harm in whole.kinds}
    for theirs in part.kinds:
        if (harm := mine.get(kind_of(theirs))) is None:
            whole.kinds.add().CopyFrom(theirs)
            continue
        for name in VERDICTS:
            setattr(harm, name, getattr(harm, name) + getattr(theirs, name))
        spills.add(harm.forced_ends, theirs.forced_ends)
        spills.add(harm.natural_ends, theirs.natural_ends)
        if theirs.HasField("evidence_ratio"):
            harm.evidence_ratio = theirs.evidence_ratio


def estimate(counts: fleet_pb2.Savings) -> None:
    """Fill in the estimates of the saving, of the spilled ends and of the harm that the counts allow."""
    treated, control = counts.treated, counts.control
    if min(treated.requests, control.requests) >= MIN_REQUESTS:
        mine, theirs = (Sums(a.requests, a.think_tokens, a.think_tokens_squares) for a in (treated, control))
        spills.set_range(counts.saved_tokens, difference(theirs, mine, CONFIDENCE))
        spills.set_range(counts.saved_ratio, saved_ratio(mine, theirs, CONFIDENCE))
    spills.estimate(counts, MIN_REQUESTS)
    if answers_alike(counts.judged_stops - counts.alike_stops, counts.judged_stops):
        counts.not_measured = counts.not_measured or ALIKE
    judged: tuple[fleet_pb2.Savings | fleet_pb2.ShorteningHarm, ...] = (counts, *counts.kinds)
    for row in judged:
        if row.judged and row.unjudged <= row.judged_stops and not counts.not_measured:
            harm = row.harm_ratio
            harm.value = row.harmful / row.judged
            harm.low = binomial_lower(row.harmful, row.judged, CONFIDENCE)
            harm.high = binomial_upper(row.harmful, row.judged, CONFIDENCE)
