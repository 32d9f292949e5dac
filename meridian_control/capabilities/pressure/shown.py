"""Shows pressure in messages of FleetService, in the decision log and on the status page: levels, measured values, and
changes of level.

All functions are pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from meridian.v1 import fleet_pb2

from meridian_control.capabilities.pressure.rule import MAX_LEVEL
from meridian_control.journal.records import Detail

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from meridian_control.capabilities.pressure.rule import LevelChange, Reading
    from meridian_control.journal.records import Compared
    from meridian_control.policy.model import Policy
    from meridian_control.policy.shortening_schema import PressurePolicy


def pressure_message(
    entry: PressurePolicy, level: int, readings: Iterable[Reading], changes: Iterable[LevelChange]
) -> fleet_pb2.Pressure:
    """Return a pressure entry on an engine."""
    return fleet_pb2.Pressure(
        name=entry.name,
        level=level,
        shadow=entry.shadow,
        readings=map(_reading, readings),
        changes=map(change_message, changes),
    )


def change_message(change: LevelChange) -> fleet_pb2.PressureChange:
    message = fleet_pb2.PressureChange(
        name=change.name,
        level_before=change.level_before,
        level=change.level,
        reading=_reading(change.reading) if change.reading is not None else None,
        shadow=change.shadow,
    )
    message.time.FromDatetime(change.time)
    return message


def _reading(reading: Reading) -> fleet_pb2.PressureReading:
    return fleet_pb2.PressureReading(**reading._asdict())


@dataclass(frozen=True, slots=True)
class PressureDetail(Detail):
    """What the decision log shows of a pressure entry that has shortened a request: the request's stage, and the newest
    change of the entry's level, None if the level has not changed."""

    stage: int
    change: LevelChange | None

    def compared(self, policy: Policy) -> Iterator[Compared]:
        """Yield the measured value and the target behind the level."""
        change = self.change
        if change is not None and (reading := change.reading) is not None:
            operator = ">" if reading.measured > reading.limit else "<="
            yield reading.target, reading.measured, operator, f"pressure {change.name} {reading.target}", reading.limit

    def fill(self, message: fleet_pb2.LoggedDecision) -> None:
        message.budget_stage = self.stage  # type: ignore[assignment]
        if self.change is not None:
            message.pressure.CopyFrom(change_message(self.change))


def levels_text(engine: fleet_pb2.Engine) -> str:
    """Return the pressure that shortens thinking on an engine, with the value behind each level; empty if none does."""
    levels = []
    for row in engine.pressures:
        if row.level and not row.shadow:
            reading = row.changes[0].reading if row.changes else fleet_pb2.PressureReading()
            why = f": {reading.target} was {reading.measured:.4g}, limit {reading.limit:.4g}" if reading.target else ""
            levels.append(f"pressure {row.name} at level {row.level} of {MAX_LEVEL}{why}")
    return "; ".join(levels)
