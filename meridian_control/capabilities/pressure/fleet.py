"""Logs each change of level of a pressure entry, with the numbers behind it, and shows the levels of all engines."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from meridian.v1 import fleet_pb2

from meridian_control.capabilities.pressure.rule import MAX_LEVEL
from meridian_control.capabilities.pressure.stream import CHANGES_TOTAL, MISSED_TOTAL, EnginePressure
from meridian_control.common.decision_words import with_limit
from meridian_control.common.look import counted
from meridian_control.common.metric_entry import counter, gauge
from meridian_control.fleet.left_behind import LeftBehind
from meridian_control.fleet.part import FleetPart
from meridian_control.fleet.trace_records import part_record
from meridian_control.fleet.turns import in_turns
from meridian_control.policy.shortening_schema import TARGETS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meridian_control.engine.session import Session
    from meridian_control.engine.totals import Totals
    from meridian_control.fleet.connection import Connection
    from meridian_control.fleet.fleet import Fleet
    from meridian_control.fleet.part import Metric

logger = logging.getLogger(__name__)

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


class FleetPressure(FleetPart):
    """Pressure on the engines of one replica."""

    failure = "changes of pressure are not logged"

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._left = LeftBehind(fleet, lambda session: session.part(EnginePressure).kept)

    async def tick(self) -> None:
        async for session in in_turns(self.fleet.connections.sessions):
            log_changes(session)

    def joined(self, connection: Connection) -> None:
        """Let a stream begin at the levels of the one before."""
        part = connection.session.part(EnginePressure)
        part.controllers = self._left.taken_by(connection)
        if part.levels:
            connection.note(part_record, self.fleet.clock(), part.record())

    def left(self, connection: Connection, replaced: bool) -> None:
        log_changes(connection.session)
        self._left.left_by(connection, replaced)

    def show_engine(self, view: fleet_pb2.Engine, session: Session) -> None:
        view.pressures.extend(session.part(EnginePressure).messages())

    def metrics(self, totals: Totals) -> Iterator[Metric]:
        listed = [session.part(EnginePressure) for session in self.fleet.connections.sessions]
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

    def cause(self, engine: fleet_pb2.Engine) -> str:
        return levels_text(engine)


def log_changes(session: Session) -> None:
    """Log the changes of a session's levels since the last call."""
    for change in session.part(EnginePressure).take_unlogged():
        reading, why = change.reading, "nothing was measured"
        if change.HasField("reading"):
            measured = with_limit(reading.measured, reading.limit)
            why = f"{reading.target} is {measured}, {counted(reading.samples, 'sample')}"
        levels: tuple[Any, ...] = change.level_before, change.level, why, " (shadow)" * change.shadow
        logger.info("pressure %s on engine %s: level %d to %d, %s%s", change.name, session.hello.engine_id, *levels)


def levels_text(engine: fleet_pb2.Engine) -> str:
    """Return the pressure that shortens thinking on an engine, with the value behind each level; empty if none does."""
    levels = []
    for row in engine.pressures:
        if row.level and not row.shadow:
            reading = row.changes[0].reading if row.changes else fleet_pb2.PressureReading()
            why = f": {reading.target} was {with_limit(reading.measured, reading.limit)}" * bool(reading.target)
            levels.append(f"pressure {row.name} at level {row.level} of {MAX_LEVEL}{why}")
    return "; ".join(levels)
