"""Converts pressure on an engine to messages of FleetService: levels, measured values, and changes of level. All
functions are pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meridian.v1 import fleet_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meridian_control.journal.records import Decision
    from meridian_control.pressure.controller import LevelChange, Reading
    from meridian_control.pressure.engine_pressure import EnginePressure


def pressure_messages(pressure: EnginePressure) -> list[fleet_pb2.Pressure]:
    """Return an engine's pressure entries, in the policy's order."""
    levels = pressure.levels
    return [
        fleet_pb2.Pressure(
            name=entry.name,
            level=levels.get(entry.name, 0),
            shadow=entry.shadow,
            readings=map(_reading, pressure.readings.get(entry.name, ())),
            changes=map(change_message, pressure.changes.get(entry.name, ())),
        )
        for entry in pressure.entries
    ]


def change_message(change: LevelChange) -> fleet_pb2.PressureChange:
    told = fleet_pb2.PressureChange(
        name=change.name,
        level_before=change.level_before,
        level=change.level,
        reading=_reading(change.reading) if change.reading is not None else None,
        shadow=change.shadow,
    )
    told.time.FromDatetime(change.time)
    return told


def _reading(reading: Reading) -> fleet_pb2.PressureReading:
    return fleet_pb2.PressureReading(**reading._asdict())


def compared_reading(made: Decision) -> Iterator[tuple[str, float, str, str, float]]:
    """Yield the measured value and the target behind the level at which pressure shortened a request."""
    change = made.level_change
    if change is not None and (reading := change.reading) is not None:
        operator = ">" if reading.measured > reading.limit else "<="
        yield reading.target, reading.measured, operator, f"pressure {change.name} {reading.target}", reading.limit
