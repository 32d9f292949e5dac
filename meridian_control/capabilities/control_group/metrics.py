"""The metrics of the control group: their entries in the catalogue, and their values.

Counters are this replica's own; gauges compare all replicas.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meridian_control.capabilities.control_group.experiments import kind_of
from meridian_control.common.metric_entry import counter, gauge

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meridian.v1 import fleet_pb2

    from meridian_control.fleet.part import Metric
    from meridian_control.policy.shortening_kinds import Kind

    Values = list[tuple[tuple[str, ...], float]]

BOUNDS = ("value", "low", "high")
ARM = ("arm",)
KIND = ("kind", "name")

ENTRIES = (
    counter(
        "meridian_arm_requests_total",
        ARM,
        "Closed requests that thought, by arm: treated, or control, whose requests nothing shortens. Each "
        "counts in this and the other `meridian_arm` counters once all that began before it have ended, or after an "
        "hour.",
        "No `control`: nothing in force shortens thinking, or `entropy.holdout_share` is 0.",
    ),
    counter(
        "meridian_arm_think_tokens_total",
        ARM,
        "Thinking tokens of these requests.",
        "Divide by `meridian_arm_requests_total`: the difference of the arms is what shortening saves per request.",
    ),
    counter(
        "meridian_arm_answer_tokens_total",
        ARM,
        "Answer tokens of these requests, if they finished after their thinking had ended.",
        "Longer answers of `treated`: set a `closing_text`, or calibrate.",
    ),
    counter(
        "meridian_arm_events_total",
        ("arm", "event"),
        "These requests by event: stopped (shortening ended the thinking, or would have), answered, reentry, abort (by "
        "the client), length.",
        "More `reentry`, `abort` or `length` per request in `treated`: thinking ends early; see `meridianctl savings`.",
    ),
    counter(
        "meridian_compared_ends_total",
        (*KIND, "end", "event"),
        "Requests by kind of shortening (for budgets and pressure also by name), by the first end of their thinking "
        "(forced by the kind, in treated requests; natural, in the control group after the kind would have ended it) "
        "and by event: ended (every such request), reentry, empty, abort (by the client), length.",
        "More `reentry` or `empty` per `ended` after `forced`: set the model's `closing_text`, or calibrate again.",
    ),
    counter(
        "meridian_control_group_shadow_saved_tokens_total",
        (),
        "Thinking tokens of the control group after the places where shortening would have ended the thinking.",
        "Far from the difference of the arms: ends come late, or requests think again.",
    ),
    counter(
        "meridian_control_group_verdicts_total",
        (*KIND, "verdict"),
        "Finished requests of the control group, by each kind that could have shortened them, and by what it would "
        "have done to their answer: harmless, harmful, or unjudged (no probe near the place of the end).",
        "Mostly `unjudged`: the engines have no room for probes, or cannot probe.",
    ),
    gauge(
        "meridian_saved_ratio",
        ("bound",),
        "Share of the thinking that the policy in force saves, by value, low and high end of the 95 % interval. Like "
        "the metrics below, it comes from the replica that leads, for all replicas.",
        "It may be too low in the first minutes of new rules. `low` below 0 later, with many requests: shortening "
        "saves nothing that can be shown.",
    ),
    gauge(
        "meridian_harm_ratio",
        (*KIND, "bound"),
        "Share of the judged requests of the control group whose answer a kind of shortening in force would have "
        "changed, with one-sided exact 95 % bounds. Absent while harm is not measured.",
        "`high` above `entropy.max_loss`: collect more requests, or calibrate again.",
    ),
    gauge(
        "meridian_harm_evidence_ratio",
        KIND,
        "Evidence that the harm of a kind of shortening exceeds `entropy.max_loss`; at 1 the control plane withdraws "
        "the kind, unless it is the policy's cap.",
        "Near 1: raise the floor or the cap in question; 1 for a cap: see the alert MeridianShorteningHarms.",
    ),
    gauge(
        "meridian_drift_evidence_ratio",
        (),
        "Evidence that a signal of live requests has left the distribution of the calibration; at 1 the control plane "
        "puts the rules into shadow.",
        "Near 1: compare the bins in `meridianctl savings`.",
    ),
    gauge(
        "meridian_entropy_withdrawn",
        (),
        "1 while the policy in force is the one by which the control plane itself withdrew a kind of shortening.",
        "1: see the alert MeridianEntropyWithdrawn.",
    ),
)


def values(total: fleet_pb2.Savings, withdrawn: bool, savings: fleet_pb2.GetSavingsResponse | None) -> Iterator[Metric]:
    """Yield each metric of the control group with its labels and values.

    total: this replica's counts. withdrawn: whether the policy in force is one by which the control plane itself has
    withdrawn a kind of shortening. savings: the newest comparison over all replicas, None on replicas that do not lead.
    """
    arms = {"treated": total.treated, "control": total.control}
    yield "meridian_arm_requests_total", [((arm,), counts.requests) for arm, counts in arms.items()]
    yield "meridian_arm_think_tokens_total", [((arm,), counts.think_tokens) for arm, counts in arms.items()]
    yield "meridian_arm_answer_tokens_total", [((arm,), counts.answer_tokens) for arm, counts in arms.items()]
    events: Values = []
    for arm, counts in arms.items():
        events += [((arm, "stopped"), counts.stopped), ((arm, "answered"), counts.answers)]
        events += [((arm, "reentry"), counts.reentries), ((arm, "abort"), counts.aborts)]
        events.append(((arm, "length"), counts.lengths))
    yield "meridian_arm_events_total", events
    ends: Values = []
    verdicts: Values = []
    for kind, judged in sorted((kind_of(harm), harm) for harm in total.kinds):
        ends += _ends(kind, "forced", judged.forced_ends) + _ends(kind, "natural", judged.natural_ends)
        verdicts += [((*kind, "harmless"), judged.judged - judged.harmful), ((*kind, "harmful"), judged.harmful)]
        verdicts.append(((*kind, "unjudged"), judged.unjudged))
    yield "meridian_compared_ends_total", ends
    yield "meridian_control_group_shadow_saved_tokens_total", [((), total.shadow_saved_tokens)]
    yield "meridian_control_group_verdicts_total", verdicts
    yield "meridian_entropy_withdrawn", [((), withdrawn)]
    in_force = [entry for entry in savings.savings if entry.in_force] if savings is not None else []
    yield "meridian_saved_ratio", _bounds(in_force, "saved_ratio")
    harms = [(kind_of(harm), harm) for entry in in_force for harm in entry.kinds]
    yield (
        "meridian_harm_ratio",
        [
            ((*kind, bound), getattr(harm.harm_ratio, bound))
            for kind, harm in harms
            if harm.HasField("harm_ratio")
            for bound in BOUNDS
        ],
    )
    yield "meridian_harm_evidence_ratio", [(tuple(kind), harm.evidence_ratio) for kind, harm in harms]
    drift = [entry.drift_evidence_ratio for entry in in_force if entry.HasField("drift_evidence_ratio")]
    yield "meridian_drift_evidence_ratio", [((), evidence) for evidence in drift]


def _ends(kind: Kind, end: str, counts: fleet_pb2.EndCounts) -> Values:
    events = {"ended": counts.ends, "reentry": counts.reentries, "empty": counts.empty_answers}
    events |= {"abort": counts.aborts, "length": counts.lengths}
    return [((*kind, end, event), count) for event, count in events.items()]


def _bounds(in_force: list[fleet_pb2.Savings], field: str) -> Values:
    intervals = [getattr(savings, field) for savings in in_force if savings.HasField(field)]  # type: ignore[arg-type]
    return [((bound,), getattr(interval, bound)) for interval in intervals for bound in BOUNDS]
