"""The metric of self-calibration: its entry in the catalogue, and its values."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from meridian_control.capabilities.self_calibration.learner import State
from meridian_control.common.metric_entry import gauge

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from meridian_control.fleet.part import Metric

STATES = "meridian_self_calibrations"
ENTRIES = (
    gauge(
        STATES,
        ("state",),
        "Models and SLO classes for which the control plane looks for a rule by itself, by state: recording, "
        "nothing_is_safe, rolling_out, in_force, withdrawn. It comes from the replica that leads.",
        "`withdrawn`: `meridianctl savings` says why. Always `recording`: too few requests; raise "
        "`telemetry.shadow_sample_ratio`.",
    ),
)


def values(states: Iterable[State]) -> Iterator[Metric]:
    """Yield the number of states of each kind; nothing where there are none."""
    counted = Counter(states)
    yield STATES, [((state.value.replace(" ", "_"),), counted[state]) for state in State if counted]
