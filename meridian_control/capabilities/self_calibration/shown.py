"""Describes what self-calibration has found, for gRPC and the status page. All functions are pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meridian.v1 import fleet_pb2

from meridian_control.capabilities.self_calibration.rule import conflicts, obstacle
from meridian_control.common.look import counted, percent
from meridian_control.common.plain_data import plain
from meridian_control.policy.effects import self_calibrates
from meridian_control.policy.model import Who

if TYPE_CHECKING:
    from collections import Counter

    from meridian_control.capabilities.self_calibration.episodes import LeftOut
    from meridian_control.capabilities.self_calibration.learner import Learner
    from meridian_control.policy.model import Policy

OFF = "off"


def message(learner: Learner, own: Policy, recorded: int, seen: Counter[LeftOut | None]) -> fleet_pb2.SelfCalibration:
    """Return what was found for a traffic. own: the policy that holds for it without a rule that was found by itself.
    recorded: requests that count for the next attempt, or since the rule is in force. seen: requests of this replica
    that were recorded, and left out for each reason."""
    who, on = Who.of_traffic(learner.traffic), self_calibrates(own)
    now = learner.hopeless(own.entropy.max_loss) or obstacle(own, conflicts(own, who)) if on else ""
    why = [now or learner.failure or learner.why, _left_out_text(seen) if on else ""]
    shown = fleet_pb2.SelfCalibration(
        model=who.model,
        slo_class=who.slo_class,
        model_fingerprint=who.fingerprint,
        state=learner.state.value if on else OFF,
        why="; ".join(filter(None, why)),
        recorded_requests=recorded,
        needed_requests=learner.needs(own.entropy.max_loss) if learner.rule is None else 0,
        attempts=learner.attempts,
        max_loss=own.entropy.max_loss,
    )
    shown.since_time.FromDatetime(learner.since)
    if (rule := learner.rule) is not None:
        shown.rule, shown.saved_ratio, shown.loss_bound = rule.text, rule.saved, rule.bound
        shown.proved_on_requests = learner.requests
    for tried in learner.tried:
        shown.tried.add(requests=tried.requests, outcome=tried.outcome).time.FromDatetime(tried.time)
    return shown


def _left_out_text(seen: Counter[LeftOut | None]) -> str:
    """Return how many requests are left out and why, if those are most of them; else an empty text."""
    reasons = [(reason, count) for reason, count in seen.most_common() if reason is not None]
    left_out, total = sum(count for _, count in reasons), seen.total()
    return f"{left_out:,} of {total:,} requests are left out: {reasons[0][0]}" if left_out > total / 2 else ""


def row(found: fleet_pb2.SelfCalibration) -> dict[str, Any]:
    """Return a row of the status page."""
    tried = [f"tried on {counted(tried.requests, 'request')}: {tried.outcome}" for tried in reversed(found.tried)]
    proof = f"{found.rule}: {proof_text(found)}" if found.rule else "none"
    return {
        **plain(found),
        "requests": requests_text(found),
        "proof": proof,
        "tried": "; ".join([*filter(None, [found.why]), *tried]),
    }


def requests_text(found: fleet_pb2.SelfCalibration) -> str:
    """Return how many requests are recorded, and how many the next attempt needs."""
    needed = f" of {found.needed_requests:,} for the next attempt" if found.needed_requests else " since then"
    return f"{found.recorded_requests:,}{needed}"


def proof_text(found: fleet_pb2.SelfCalibration) -> str:
    """Return what the rule saves and may lose, and on how many requests that was measured; empty without a rule."""
    if not found.rule:
        return ""
    saved, bound, allowed = percent(found.saved_ratio), percent(found.loss_bound, 2), percent(found.max_loss, 2)
    return (
        f"saves {saved}; loses at most {bound} of the answers, allowed {allowed}; {found.proved_on_requests:,} requests"
    )
