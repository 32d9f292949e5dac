"""Brings the rows of a step's record into an order that does not depend on how the step was accounted."""

from __future__ import annotations

from meridian_agent.core.step_record import StepRecord


def in_slot_order(record: StepRecord) -> StepRecord:
    """Return the record with its rows in the order of their slots; in a record of the agent the members of the run come
    first."""
    record.spread()
    order = sorted(range(len(record.slots)), key=lambda row: record.slots[row])
    columns = record.slots, record.phases, record.rows, record.row_flags()
    record.slots, record.phases, record.rows, record.flags = ([column[row] for row in order] for column in columns)
    record.text = ()
    return record
