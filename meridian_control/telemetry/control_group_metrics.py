"""The values of the control group's metrics. Counters are this replica's own; gauges compare all replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meridian_control.fleet.savings import kind_of, withdrawn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meridian.v1 import fleet_pb2

    from meridian_control.fleet.fleet import Fleet
    from meridian_control.policy.shortening_kinds import Kind
    from meridian_control.session.arms import Ends

    Values = list[tuple[tuple[str, ...], float]]

BOUNDS = ("value", "low", "high")


def control_group(fleet: Fleet, savings: fleet_pb2.GetSavingsResponse | None) -> Iterator[tuple[str, Values]]:
    """Yield each metric of the control group with its labels and values.

    savings: the newest comparison over all replicas, None on replicas that do not lead.
    """
    total = fleet.experiments.total()
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
    for kind, judged in sorted(total.kinds.items()):
        ends += _ends(kind, "forced", judged.forced_ends) + _ends(kind, "natural", judged.natural_ends)
        verdicts += [((*kind, "harmless"), judged.judged - judged.harmful), ((*kind, "harmful"), judged.harmful)]
        verdicts.append(((*kind, "unjudged"), judged.unjudged))
    yield "meridian_compared_ends_total", ends
    yield "meridian_control_group_shadow_saved_tokens_total", [((), total.shadow_saved_tokens)]
    yield "meridian_control_group_verdicts_total", verdicts
    yield "meridian_entropy_withdrawn", [((), withdrawn(fleet.policy) is not None)]
    found = [told for told in savings.savings if told.in_force] if savings is not None else []
    yield "meridian_saved_ratio", _bounds(found, "saved_ratio")
    harms = [(kind_of(harm), harm) for told in found for harm in told.kinds]
    yield (
        "meridian_harm_ratio",
        [
            ((*kind, bound), getattr(harm.harm_ratio, bound))
            for kind, harm in harms
            if harm.HasField("harm_ratio")
            for bound in BOUNDS
        ],
    )
    yield "meridian_long_answer_difference_ratio", _bounds(found, "long_answers")
    yield "meridian_spill_difference_ratio", _bounds(found, "spills")
    yield "meridian_harm_evidence_ratio", [(tuple(kind), harm.evidence_ratio) for kind, harm in harms]
    drift = [told.drift_evidence_ratio for told in found if told.HasField("drift_evidence_ratio")]
    yield "meridian_drift_evidence_ratio", [((), evidence) for evidence in drift]


def _ends(kind: Kind, end: str, counts: Ends) -> Values:
    events = {"ended": counts.ends, "reentry": counts.reentries, "empty": counts.empty_answers}
    events |= {"abort": counts.aborts, "length": counts.lengths}
    return [((*kind, end, event), count) for event, count in events.items()]


def _bounds(found: list[fleet_pb2.Savings], field: str) -> Values:
    told = [getattr(savings, field) for savings in found if savings.HasField(field)]  # type: ignore[arg-type]
    return [((bound,), getattr(interval, bound)) for interval in told for bound in BOUNDS]
