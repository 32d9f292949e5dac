"""Measures the targets of an engine's requests, and says in which stage pressure puts each request.

The object keeps what it needs of each request by slot, beside the request table, and only while the policy has a
pressure entry. The code does no I/O and reads no clock, and the levels follow from the agent's reports alone, so that a
recorded stream replays to the same levels. Times are milliseconds on the session's clock. Each object belongs to one
session.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from meridian.v1 import fleet_pb2

from meridian_control.capabilities.pressure.rule import (
    FORGET,
    MAX_HOLD,
    MAX_LEVEL,
    Controller,
    Reading,
    least_gain_first,
    stage_at,
    worst,
)
from meridian_control.capabilities.pressure.window import DECIMALS, Window
from meridian_control.common.slices import at_once
from meridian_control.common.table_columns import ANSWER_TOKEN, NO_TOKEN, THINK_END
from meridian_control.engine.merged_steps import step_of
from meridian_control.engine.moments import changes_at_steps
from meridian_control.engine.part import Part
from meridian_control.engine.request_table import OUTPUT, THINK
from meridian_control.engine.shortening import UNSHORTENED, matching
from meridian_control.engine.token_rows import FLAG_FROM_OUTPUT, differs
from meridian_control.journal.records import Detail
from meridian_control.policy.shortening_kinds import acts_on_thinking

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from datetime import datetime

    from meridian.v1 import agent_pb2
    from numpy.typing import NDArray

    from meridian_control.common.opened_request import OpenedRequest
    from meridian_control.common.slices import Sliced
    from meridian_control.engine.part import Stream
    from meridian_control.engine.shortening import Stages
    from meridian_control.journal.records import Compared, Shortening
    from meridian_control.policy.model import Policy, Who
    from meridian_control.policy.shortening_schema import PressurePolicy

# Counters: changes of the level by entry and direction, and windows by entry and missed target.
CHANGES_TOTAL, MISSED_TOTAL = "meridian_pressure_changes_total", "meridian_pressure_missed_windows_total"
# Number of newest changes that are kept of each entry.
CHANGES = 8
# Windows of an idle engine that are judged at most; after so many, every level is 0 and earlier misses are forgotten.
MOST_IDLE = 1 + MAX_LEVEL * (MAX_HOLD + 1) + FORGET


@dataclass(frozen=True, slots=True)
class PressureDetail(Detail):
    """Tells the decision log of a pressure entry that has shortened a request.

    name: the entry's. stage: the request's. change: the newest one of the entry's level, None if the level has not
    changed on this stream.
    """

    name: str
    stage: int
    change: fleet_pb2.PressureChange | None

    def compared(self, policy: Policy) -> Iterator[Compared]:
        """Yield the measured value and the target behind the level."""
        if self.change is not None and self.change.HasField("reading"):
            name, reading = self.change.name, self.change.reading
            operator = ">" if reading.measured > reading.limit else "<="
            yield reading.target, reading.measured, operator, f"pressure {name} {reading.target}", reading.limit

    def fill(self, message: fleet_pb2.LoggedDecision) -> None:
        message.budget_stage = self.stage  # type: ignore[assignment]
        message.pressure.name = self.name
        if self.change is not None:
            message.pressure.CopyFrom(self.change)


class EnginePressure(Part):
    """The pressure entries on one engine, which shorten its requests in stages.

    levels: by the entry's name, without those at level 0. controllers: by name. readings: by name, those of the newest
    complete window. changes: by name, the newest changes, newest first.
    """

    section = "pressure"

    def __init__(self, stream: Stream) -> None:
        self._stream, self._table = stream, stream.table
        stream.policies.shorteners.append(self)
        self.entries: tuple[PressurePolicy, ...] = ()
        self.readings: dict[str, list[Reading]] = {}
        self.changes: dict[str, deque[fleet_pb2.PressureChange]] = {}
        self._unlogged: list[fleet_pb2.PressureChange] = []
        self.controllers: dict[str, Controller] = {}
        # Names of the entries whose level has an effect.
        self._acting: set[str] = set()
        self._windows: list[Window] = []
        self._forget()

    def _forget(self) -> None:
        """Forget all requests."""
        # The entries that match a request, and of these the ones that count it among those that gain least: one bit for
        # each entry.
        self._members, self._first = np.zeros(0, np.int64), np.zeros(0, np.int64)
        # Time at which a request was opened, NaN if it is not known.
        self._opened_ms = np.zeros(0)
        # Whether a request has generated a token, and an answer token; whether its answer was preempted.
        self._begun, self._answered, self._hit = (np.zeros(0, bool) for _ in range(3))

    @property
    def kept(self) -> dict[str, Controller]:
        """The controllers with which the engine's next stream begins: the levels alone, as recordings have them,
        without those of entries whose level has no effect, which rises further than would be enough."""
        idle = {entry.name for entry in self.entries} - self._acting
        return {name: Controller(level) for name, level in self.levels.items() if name not in idle}

    @property
    def levels(self) -> dict[str, int]:
        return {name: controller.level for name, controller in self.controllers.items() if controller.level}

    def messages(self) -> list[fleet_pb2.Pressure]:
        """Return the entries, in the policy's order."""
        levels = self.levels
        return [
            fleet_pb2.Pressure(
                name=entry.name,
                level=levels.get(entry.name, 0),
                shadow=entry.shadow,
                readings=map(_message, self.readings.get(entry.name, ())),
                changes=self.changes.get(entry.name, ()),
            )
            for entry in self.entries
        ]

    def take_unlogged(self) -> list[fleet_pb2.PressureChange]:
        """Return the changes since the last call."""
        if not (changes := self._unlogged):
            return changes
        self._unlogged = []
        return changes

    # --------------------------------------------------------------------------------------------------- recordings

    def records(self) -> Iterable[fleet_pb2.TraceRecord]:
        return [self.record()] if self.levels else []

    def record(self) -> fleet_pb2.TraceRecord:
        """Return a record of the levels."""
        record = fleet_pb2.TraceRecord(pressure_levels=fleet_pb2.TracedLevels(levels=self.levels))
        record.pressure_levels.SetInParent()
        return record

    def recorded(self, record: fleet_pb2.TraceRecord) -> None:
        if record.HasField("pressure_levels"):
            self.set_levels(record.pressure_levels.levels)

    def set_levels(self, levels: Mapping[str, int]) -> None:
        """Set the levels by the entry's name, as they were when a recording began; a missing entry has level 0."""
        self.controllers = {name: Controller(levels.get(name, 0)) for name in {*self.controllers, *levels}}
        if self.entries:
            at_once(self._stream.shorten_again(self._table.slots().tolist()))

    # ----------------------------------------------------------------------------------------------------- requests

    def policy_begins(self, revision: int, policy: Policy, now: datetime) -> None:
        """Put a policy's entries in force. An entry keeps its level, unless only now the level has an effect, and those
        that gain least under its name; all windows begin anew."""
        entries = policy.pressure
        if not self.entries:
            self._forget()
        before, self.entries = {entry.name: index for index, entry in enumerate(self.entries)}, entries
        first = np.zeros_like(self._first)
        for index, entry in enumerate(entries):
            if entry.name in before:
                first |= (self._first >> before[entry.name] & 1) << index
        self._first = first
        names, acted = {entry.name for entry in entries}, self._acting
        caps = acts_on_thinking(policy)
        self._acting = {entry.name for entry in entries if not entry.shadow and (caps or entry.entropy_in_force)}
        # Without an effect a level rises further than would be enough.
        idle = {name for name in self._acting - acted if name in before}
        self.controllers = {
            name: Controller() if name in idle else self.controllers.get(name, Controller()) for name in sorted(names)
        }
        self.readings = {}
        self.changes = {name: kept for name, kept in self.changes.items() if name in names}
        self._windows = [Window(entry, self._stream.clock_ms(now)) for entry in entries]

    def assign(self, slot: int, opened: OpenedRequest, who: Who, again: bool) -> tuple[PressurePolicy, ...]:
        table, entries = self._table, matching(self.entries, who)
        if slot >= len(self._members):
            self._grow(len(table.info))
        self._members[slot] = sum(1 << index for index, entry in enumerate(self.entries) if entry in entries)
        self._first[slot] &= self._members[slot] if again else 0
        self._answered[slot] = table.output_tokens[slot] > 0
        if table.newest_token[slot] == NO_TOKEN:
            has_tokens = bool(table.think_tokens[slot] or table.output_tokens[slot])
            self._opened_ms[slot] = np.nan if has_tokens else table.token_ms[slot]
            self._begun[slot], self._hit[slot] = has_tokens, False
        return entries

    def _grow(self, capacity: int) -> None:
        for name, empty in (("_members", 0), ("_first", 0), ("_opened_ms", np.nan), ("_begun", 1), ("_answered", 1)):
            column = getattr(self, name)
            grown = np.full(capacity, empty, column.dtype)
            grown[: len(column)] = column
            setattr(self, name, grown)
        self._hit = np.concatenate([self._hit, np.zeros(capacity - len(self._hit), bool)])

    def stages_of(self, slot: int) -> Stages:
        if slot >= len(self._members) or not (members := int(self._members[slot])):
            return ()
        first, stages = int(self._first[slot]), []
        for index, entry in enumerate(self.entries):
            if members >> index & 1:
                stage = stage_at(self.controllers[entry.name].level, bool(first >> index & 1))
                stages += [(index, stage)] if stage > UNSHORTENED else []
        return tuple(stages)

    def has_shadow(self, slot: int) -> bool:
        members = int(self._members[slot]) if slot < len(self._members) else 0
        return any(entry.shadow and members >> index & 1 for index, entry in enumerate(self.entries))

    def detail(self, by: Shortening) -> PressureDetail:
        """Return what the decision log shows of an entry: its stage, and the newest change of its level if the level
        has changed on this stream."""
        return PressureDetail(by.name, by.stage, self.changes[by.name][0] if by.name in self.changes else None)

    # ---------------------------------------------------------------------------------------------------- measuring

    def reported(self, report: agent_pb2.StepReport, now: datetime) -> None:
        """Measure the report."""
        if not self.entries:
            return
        table, rows = self._table, self._table.history.rows
        if len(rows.s):
            fresh = (~self._begun[rows.s]).nonzero()[0]
            slots = rows.s[fresh]
            self._add("ttft_p99_ms", slots, rows.at_ms[rows.first[fresh]] - self._opened_ms[slots])
            self._begun[slots] = True
            if rows.flags_seen & FLAG_FROM_OUTPUT:
                self._take_back_answers()
            self._take_answers()
        if report.HasField("joined"):
            self._add("queueing_p99_ms", *table.joined)
        if report.preempted:
            self._take_preemptions(report)

    def _take_preemptions(self, report: agent_pb2.StepReport) -> None:
        steps = step_of(report, "preempted", len(report.preempted))
        for change in changes_at_steps(self._table, "preempted", report.preempted, steps):
            slot = change.slot
            if change.phase == OUTPUT and not self._hit[slot]:
                self._hit[slot] = True
                # An answer that has not begun counts, and counts as preempted, once it begins.
                for window in self._windows_of(slot) if self._answered[slot] else ():
                    window.preempted += 1

    def _take_back_answers(self) -> None:
        """Forget that answers have begun which were the beginning of a start marker. Their times stay in the
        window."""
        rows = self._table.history.rows
        slots = np.unique(rows.slot[(rows.flags & FLAG_FROM_OUTPUT) != 0])
        for slot in slots[self._answered[slots] & (self._table.output_tokens[slots] == 0)].tolist():
            self._answered[slot] = False
            for window in self._windows_of(slot):
                window.answers = max(0, window.answers - 1)

    def _take_answers(self) -> None:
        table, rows = self._table, self._table.history.rows
        answers = rows.answering.nonzero()[0]
        if not len(answers):
            return
        slots = rows.slot[answers]
        # Text that turned out to be the beginning of a start marker was no answer.
        new = differs(slots) & ~self._answered[slots] & (table.output_tokens[slots] > 0)
        begins = slots[new]
        self._add("ttfvt_p99_ms", begins, rows.at_ms[answers[new]] - self._opened_ms[begins])
        self._answered[begins] = True
        for slot in begins.tolist():
            for window in self._windows_of(slot):
                window.answers += 1
                window.preempted += bool(self._hit[slot])
        intervals = table.intervals
        slots = rows.slot[intervals.row]
        for target, kind in (("output_itl_p99_ms", ANSWER_TOKEN), ("ttot_p99_ms", THINK_END)):
            among = intervals.previous == kind
            self._add(target, slots[among], intervals.ms[among])

    def _add(self, target: str, slots: NDArray[np.int64], times_ms: NDArray[np.float64]) -> None:
        """Add milliseconds of a target, [times], to the windows of the entries that match the requests in the slots,
        [times]. NaN is no time; a negative time, of a report that was delayed, counts as 0."""
        for index, window in enumerate(self._windows if len(slots) else ()):
            if target in window.targets:
                matching_ms = times_ms[(self._members[slots] >> index & 1).astype(bool) & np.isfinite(times_ms)]
                window.add_times(target, np.maximum(matching_ms, 0.0))

    def _windows_of(self, slot: int) -> list[Window]:
        return [window for index, window in enumerate(self._windows) if self._members[slot] >> index & 1]

    def _waiting_ms(self, index: int, now_ms: float) -> dict[str, NDArray[np.float64]]:
        """Return, by target, for how long requests of an entry have waited so far."""
        table, size = self._table, len(self._members)
        mine = table.live[:size] & (self._members >> index & 1).astype(bool)
        opened, newest = now_ms - self._opened_ms, table.newest_token[:size]
        since = now_ms - table.token_ms[:size]
        return {
            "ttft_p99_ms": opened[mine & ~self._begun & np.isfinite(opened)],
            "ttfvt_p99_ms": opened[mine & ~self._answered & np.isfinite(opened)],
            "queueing_p99_ms": opened[mine & table.queued[:size] & np.isfinite(opened)],
            "ttot_p99_ms": since[mine & (newest == THINK_END)],
            "output_itl_p99_ms": since[mine & (newest == ANSWER_TOKEN)],
        }

    # ------------------------------------------------------------------------------------------------------- levels

    def policy_changed(self, now: datetime) -> None:
        self._restart(now)

    def snapshot_ends(self, now: datetime) -> None:
        self._restart(now)

    def _restart(self, now: datetime) -> None:
        """Begin all windows anew, with the answers of the requests that are assigned."""
        for index, window in enumerate(self._windows):
            window.restart(self._stream.clock_ms(now), self._answering(index))

    def rest(self, now: datetime) -> None:
        """Judge the windows that are over on an engine without requests, which sends no reports. Windows keep their
        length, so the levels do not depend on how often the method is called."""
        if not self.entries or self._table.live.any():
            return
        now_ms = self._stream.clock_ms(now)
        self._follow_clock(now_ms)
        for index, window in enumerate(self._windows):
            over = int(round(now_ms - window.start_ms, DECIMALS) / window.length_ms)
            if over > 0:
                self._judge(index, now_ms, now)
                window.restart(round(window.start_ms + over * window.length_ms, DECIMALS))
            if over > 1:
                # The windows after the first one have no values.
                readings = self.readings[window.entry.name] = window.readings({})
                for _ in range(min(over - 1, MOST_IDLE)):
                    self._decide(window.entry, readings, now)

    def report_begins(self, now: datetime, decides: bool) -> Sliced[None] | None:
        """Change the levels by the reports so far; the newest report's decisions read them."""
        if not self.entries:
            return None
        if not decides:
            self._restart(now)
        elif slots := self._judge_windows(self._stream.clock_ms(now), now):
            return self._stream.shorten_again(slots)
        return None

    def _judge_windows(self, now_ms: float, now: datetime) -> list[int]:
        """Compare the values of windows that are over with the targets; return the slots of the live requests whose
        stage changes."""
        over = [index for index, window in enumerate(self._windows) if window.is_over(now_ms)]
        if not over:
            self._follow_clock(now_ms)
            return []
        before = {slot: self.stages_of(slot) for slot in self._table.slots().tolist()}
        for index in over:
            self._judge(index, now_ms, now)
            self._windows[index].restart(now_ms, self._answering(index))
        return [slot for slot, stages in before.items() if stages != self.stages_of(slot)]

    def _follow_clock(self, now_ms: float) -> None:
        """Begin the windows anew if the wall clock was set back."""
        for window in self._windows:
            window.start_ms = min(window.start_ms, now_ms)

    def _judge(self, index: int, now_ms: float, now: datetime) -> None:
        window, entry = self._windows[index], self.entries[index]
        readings = self.readings[entry.name] = window.readings(self._waiting_ms(index, now_ms))
        for reading in readings:
            if reading.missed:
                self._stream.count(MISSED_TOTAL, (entry.name, reading.target))
        self._decide(entry, readings, now)
        self._choose(index)

    def _decide(self, entry: PressurePolicy, readings: list[Reading], now: datetime) -> None:
        controller = self.controllers[entry.name]
        before = controller.level
        if (level := controller.judge(readings)) == before:
            return
        reading = worst(readings)
        change = fleet_pb2.PressureChange(
            name=entry.name,
            level_before=before,
            level=level,
            reading=_message(reading) if reading is not None else None,
            shadow=entry.shadow,
        )
        change.time.FromDatetime(now)
        self.changes.setdefault(entry.name, deque(maxlen=CHANGES)).appendleft(change)
        self._unlogged.append(change)
        self._stream.count(CHANGES_TOTAL, (entry.name, "shortened" if level > before else "restored"))

    def _answering(self, index: int) -> int:
        """Return the number of live requests of an entry that have begun their answer."""
        mine = self._table.live[: len(self._members)] & (self._members >> index & 1).astype(bool)
        return int(np.count_nonzero(mine & self._answered))

    def _choose(self, index: int) -> None:
        """Choose the half of the entry's thinking requests that gain least from more thinking, if its level treats
        requests differently. A request that is chosen stays so until the level changes to one that does not."""
        bit, size = 1 << index, len(self._members)
        if not self.controllers[self.entries[index].name].level % 2:
            self._first &= ~bit
            return
        table = self._table
        slots = (table.live[:size] & (table.phase[:size] == THINK) & ((self._members & bit) != 0)).nonzero()[0]
        others = slots[(self._first[slots] & bit) == 0]
        wanted = (len(slots) + 1) // 2 - (len(slots) - len(others))
        if wanted > 0:
            self._first[least_gain_first(table, others)[:wanted]] |= bit


def _message(reading: Reading) -> fleet_pb2.PressureReading:
    return fleet_pb2.PressureReading(**reading._asdict())
