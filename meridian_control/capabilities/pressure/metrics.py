"""The metrics of pressure: their entries in the catalogue, and their values.

The series are bounded, because each label value is the name of a pressure entry in the policy, a target or a direction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meridian_control.capabilities.pressure.stream import CHANGES_TOTAL, MISSED_TOTAL
from meridian_control.common.metric_entry import counter, gauge
from meridian_control.policy.shortening_schema import TARGETS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from meridian_control.capabilities.pressure.stream import EnginePressure
    from meridian_control.engine.totals import Totals
    from meridian_control.fleet.part import Metric

PRESSURE = ("pressure",)
DIRECTIONS = ("shortened", "restored")

ENTRIES = (
    gauge(
        "meridian_pressure_level",
        PRESSURE,
        "Highest level of the pressure entry on an engine of this replica, from 0 to 6.",
        "6 for long: thinking yields no more; add engines, or raise the target.",
    ),
    gauge(
        "meridian_pressure_engines",
        PRESSURE,
        "Engines of this replica on which the pressure entry has a level above 0.",
        "A few of many: `meridianctl pressure` shows which; look at their load. All: add engines.",
    ),
    counter(
        CHANGES_TOTAL,
        ("pressure", "direction"),
        "Changes of the level: `shortened` or `restored`.",
        "Both rise steadily: load comes and goes faster than the level; raise `window_s`.",
    ),
    counter(
        MISSED_TOTAL,
        ("pressure", "target"),
        "Windows of engines in which the target was missed.",
        "Rises at level 6, or in shadow: people feel it; see the target's own metric.",
    ),
)


def values(engines: Iterable[EnginePressure], totals: Totals) -> Iterator[Metric]:
    """Yield each metric with its labels and values, for the pressure entries of the policies in force."""
    listed = list(engines)
    if not any(engine.entries for engine in listed):
        yield from ((entry.name, []) for entry in ENTRIES)
        return
    entries = {(entry.name, entry) for engine in listed for entry in engine.entries}
    limits = {(name, target) for name, entry in entries for target in TARGETS if getattr(entry, target)}
    names = {name for name, _ in limits}
    levels = {name: [engine.levels.get(name, 0) for engine in listed] for name in names}
    changes = [(name, direction) for name in names for direction in DIRECTIONS]
    yield "meridian_pressure_level", [((name,), max(engine_levels)) for name, engine_levels in levels.items()]
    yield (
        "meridian_pressure_engines",
        [((name,), sum(level > 0 for level in engine_levels)) for name, engine_levels in levels.items()],
    )
    yield CHANGES_TOTAL, [(key, totals.counted[CHANGES_TOTAL, key]) for key in changes]
    yield MISSED_TOTAL, [(key, totals.counted[MISSED_TOTAL, key]) for key in limits]
