"""The counts of treated requests and of the control group as messages, and the estimates that follow from the counts.

Estimates are computed from sums over all replicas. The functions are pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from meridian.v1 import fleet_pb2

from meridian_control.common.inference import Sums, binomial_lower, binomial_upper, difference, saved_ratio
from meridian_control.fleet import spills
from meridian_control.policy.drift_schema import SIGNALS
from meridian_control.session.arms import rules_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meridian_control.policy.store import StoredRevision
    from meridian_control.session.arms import Experiment, Experiments

# Author of the policy revisions by which the control plane itself puts the entropy rules into shadow.
WITHDRAWER = "meridian-harm-guard"
# Confidence of the intervals and bounds of saving and harm; smallest number of requests on each side for a comparison.
CONFIDENCE, MIN_REQUESTS = 0.95, 30
# Counts of `Savings` that add up over replicas.
COUNTS = ("shadow_saved_tokens", "judged", "judged_stops", "harmful", "unjudged")
ARMS = ("treated", "control")
# Fields that only the replica that leads fills in.
EVIDENCE: tuple[Literal["evidence_ratio"], Literal["drift_evidence_ratio"]] = ("evidence_ratio", "drift_evidence_ratio")


def withdrawn(policy: StoredRevision | None) -> StoredRevision | None:
    """Return the revision if the control plane itself has stored it to put the entropy rules into shadow."""
    return policy if policy is not None and policy.author == WITHDRAWER else None


def mark_withdrawn(engines: Iterable[fleet_pb2.Engine], policy: StoredRevision | None) -> None:
    """Set on the engines of a withdrawing revision why the entropy rules are in shadow. policy: that in force."""
    if (withdrawal := withdrawn(policy)) is not None:
        for engine in engines:
            engine.withdrawn = withdrawal.reason if engine.revision == withdrawal.revision else ""


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
            **{name: getattr(kept, name) for name in COUNTS},
            **_samples(kept),
        )
        for kept in experiments.newest()
        if kept.rules == in_force
        or kept.treated.requests
        or kept.control.requests
        or any(any(seen) for seen in kept.samples.values())
    ]


def _samples(kept: Experiment) -> dict[str, Any]:
    """Return the fields of Savings with the bins of each signal: the requests of the calibration and the live requests
    in each bin."""
    fields: dict[str, Any] = {}
    for signal in kept.references:
        bins: Any = kept.references[signal]
        seen = zip(bins, kept.samples[signal], strict=True)
        made, edge = (fleet_pb2.EatSamples, "max_nats") if signal == "eat" else (fleet_pb2.SignalSamples, "max_value")
        counts = [{edge: one.max_value, "calibrated": one.requests, "seen": requests} for one, requests in seen]
        fields[f"{signal}_samples"] = [made(**each) for each in counts]
    return fields


def merged(answers: Iterable[fleet_pb2.GetSavingsResponse]) -> fleet_pb2.GetSavingsResponse:
    """Return the sums over the replicas' answers for each set of rules, with estimates; the newest rules first."""
    told, by_rules = fleet_pb2.GetSavingsResponse(), dict[str, fleet_pb2.Savings]()
    for answer in answers:
        if answer.withdrawn_revision > told.withdrawn_revision:
            told.withdrawn_revision, told.withdrawn_reason = answer.withdrawn_revision, answer.withdrawn_reason
        for part in answer.savings:
            if (whole := by_rules.get(part.rules)) is None:
                by_rules[part.rules] = whole = fleet_pb2.Savings()
                whole.CopyFrom(part)
            else:
                _add(whole, part)
    for whole in by_rules.values():
        estimate(whole)
    told.savings.extend(sorted(by_rules.values(), key=lambda s: (not s.in_force, -s.since_revision)))
    return told


def _add(whole: fleet_pb2.Savings, part: fleet_pb2.Savings) -> None:
    whole.since_revision = min(whole.since_revision, part.since_revision)
    whole.in_force |= part.in_force
    for name in COUNTS:
        setattr(whole, name, getattr(whole, name) + getattr(part, name))
    for signal in SIGNALS:
        name = f"{signal}_samples"
        for mine, theirs in zip(getattr(whole, name), getattr(part, name), strict=False):
            mine.seen += theirs.seen
    for name in EVIDENCE:
        if part.HasField(name):
            setattr(whole, name, getattr(part, name))
    for arm in ARMS:
        mine, theirs = getattr(whole, arm), getattr(part, arm)
        for count in fleet_pb2.ArmCounts.DESCRIPTOR.fields:
            setattr(mine, count.name, getattr(mine, count.name) + getattr(theirs, count.name))
    spills.add(whole.forced_ends, part.forced_ends)
    spills.add(whole.natural_ends, part.natural_ends)


def estimate(counts: fleet_pb2.Savings) -> None:
    """Fill in the estimates of the saving, of the spilled ends and of the harm that the counts allow."""
    treated, control = counts.treated, counts.control
    if min(treated.requests, control.requests) >= MIN_REQUESTS:
        mine, theirs = (Sums(a.requests, a.think_tokens, a.think_tokens_squares) for a in (treated, control))
        spills.set_range(counts.saved_tokens, difference(theirs, mine, CONFIDENCE))
        spills.set_range(counts.saved_ratio, saved_ratio(mine, theirs, CONFIDENCE))
    spills.estimate(counts, MIN_REQUESTS)
    if counts.judged and counts.unjudged <= counts.judged_stops:
        harm = counts.harm_ratio
        harm.value = counts.harmful / counts.judged
        harm.low = binomial_lower(counts.harmful, counts.judged, CONFIDENCE)
        harm.high = binomial_upper(counts.harmful, counts.judged, CONFIDENCE)
