"""Measures the targets of an engine's requests, and says in which stage pressure puts each request.

The object keeps what it needs of each request by slot, beside the request table, and only while the policy has a
pressure entry. The code does no I/O and reads no clock, and the levels follow from the agent's reports alone, so that a
recorded stream replays to the same levels. Times are milliseconds on the session's clock. Each object belongs to one
session.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from meridian_control.budgets.stages import UNSHORTENED
from meridian_control.pressure.controller import (
    FORGET,
    MAX_HOLD,
    MAX_LEVEL,
    Controller,
    LevelChange,
    Reading,
    stage_at,
    worst,
)
from meridian_control.pressure.gains import least_gain_first
from meridian_control.pressure.window import DECIMALS, Window
from meridian_control.table.request_table import OUTPUT, THINK
from meridian_control.table.table_columns import ANSWER_TOKEN, NO_TOKEN, THINK_END
from meridian_control.table.token_rows import FLAG_FROM_OUTPUT, differs

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Collection, Mapping, Sequence
    from datetime import datetime

    from meridian.v1 import agent_pb2
    from numpy.typing import NDArray

    from meridian_control.policy.shortening_schema import PressurePolicy, Shortener
    from meridian_control.table.request_table import RequestTable

# Number of newest changes that are kept of each entry.
CHANGES = 8
# Windows of an idle engine that are judged at most; after so many, every level is 0 and earlier misses are forgotten.
MOST_IDLE = 1 + MAX_LEVEL * (MAX_HOLD + 1) + FORGET


class EnginePressure:
    """The pressure entries on one engine.

    levels: by the entry's name, without those at level 0. readings: by name, those of the newest complete window.
    changes: by name, the newest changes, newest first. counts: changes by name and direction. missed: windows by name
    and missed target.
    """

    def __init__(self, table: RequestTable, counts: Counter[tuple[str, str]], missed: Counter[tuple[str, str]]) -> None:
        self._table = table
        self.entries: tuple[PressurePolicy, ...] = ()
        self.readings: dict[str, list[Reading]] = {}
        self.changes: dict[str, deque[LevelChange]] = {}
        self.counts, self.missed = counts, missed
        self._unlogged: list[LevelChange] = []
        self._controllers: dict[str, Controller] = {}
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
    def levels(self) -> dict[str, int]:
        return {name: one.level for name, one in self._controllers.items() if one.level}

    def newest_change(self, name: str) -> LevelChange | None:
        """Return the newest change of an entry's level, None if its level has not changed on this stream."""
        return self.changes[name][0] if name in self.changes else None

    def take_unlogged(self) -> list[LevelChange]:
        """Return the changes since the last call."""
        if not (found := self._unlogged):
            return found
        self._unlogged = []
        return found

    def resume(self, levels: Mapping[str, int]) -> None:
        """Set the levels by the entry's name, as they were when a recording began; a missing entry has level 0."""
        self._controllers = {name: Controller(levels.get(name, 0)) for name in {*self._controllers, *levels}}

    # ----------------------------------------------------------------------------------------------------- requests

    def apply(self, entries: tuple[PressurePolicy, ...], now_ms: float) -> None:
        """Put a policy's entries in force. An entry keeps its level and those that gain least under its name; all
        windows begin anew. All live requests must be assigned again."""
        if not self.entries:
            self._forget()
        before, self.entries = {entry.name: index for index, entry in enumerate(self.entries)}, entries
        first = np.zeros_like(self._first)
        for index, entry in enumerate(entries):
            if entry.name in before:
                first |= (self._first >> before[entry.name] & 1) << index
        self._first = first
        names = {entry.name for entry in entries}
        self._controllers = {name: self._controllers.get(name, Controller()) for name in sorted(names)}
        self.readings = {}
        self.changes = {name: kept for name, kept in self.changes.items() if name in names}
        self._windows = [Window(entry, now_ms) for entry in entries]

    def assign(self, slot: int, entries: Collection[PressurePolicy], again: bool) -> None:
        """Note the entries that match a request, which the table has already opened. again: whether the request was in
        the slot under the previous policy, too."""
        table = self._table
        if slot >= len(self._members):
            self._grow(len(table.info))
        self._members[slot] = sum(1 << index for index, entry in enumerate(self.entries) if entry in entries)
        self._first[slot] &= self._members[slot] if again else 0
        self._answered[slot] = table.output_tokens[slot] > 0
        if table.newest_token[slot] == NO_TOKEN:
            has_tokens = bool(table.think_tokens[slot] or table.output_tokens[slot])
            self._opened_ms[slot] = np.nan if has_tokens else table.token_ms[slot]
            self._begun[slot], self._hit[slot] = has_tokens, False

    def _grow(self, capacity: int) -> None:
        for name, empty in (("_members", 0), ("_first", 0), ("_opened_ms", np.nan), ("_begun", 1), ("_answered", 1)):
            column = getattr(self, name)
            grown = np.full(capacity, empty, column.dtype)
            grown[: len(column)] = column
            setattr(self, name, grown)
        self._hit = np.concatenate([self._hit, np.zeros(capacity - len(self._hit), bool)])

    def stages(self, slot: int) -> tuple[tuple[int, int], ...]:
        """Return the entries that shorten the request in a slot, by their index in the policy, each with its stage."""
        if slot >= len(self._members) or not (members := int(self._members[slot])):
            return ()
        first, found = int(self._first[slot]), []
        for index, entry in enumerate(self.entries):
            if members >> index & 1:
                stage = stage_at(self._controllers[entry.name].level, bool(first >> index & 1))
                found += [(index, stage)] if stage > UNSHORTENED else []
        return tuple(found)

    def has_shadow(self, slot: int) -> bool:
        """Whether an entry in shadow matches the request in a slot."""
        members = int(self._members[slot]) if slot < len(self._members) else 0
        return any(entry.shadow and members >> index & 1 for index, entry in enumerate(self.entries))

    def in_stages(self, stages: Sequence[tuple[int, int]]) -> list[tuple[Shortener, int]]:
        """Return the entries themselves, as `shortened` reads them. stages: as `stages` returns them."""
        return [(self.entries[index], stage) for index, stage in stages]

    # ---------------------------------------------------------------------------------------------------- measuring

    def take(self, report: agent_pb2.StepReport) -> None:
        """Measure a report that the table has taken in; the requests that it closes must still be there."""
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
        for slot in report.preempted:
            if table.holds(slot) and table.phase[slot] == OUTPUT and not self._hit[slot]:
                self._hit[slot] = True
                for window in self._windows_of(slot):
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
                found = times_ms[(self._members[slots] >> index & 1).astype(bool) & np.isfinite(times_ms)]
                window.add(target, np.maximum(found, 0.0))

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

    def restart(self, now_ms: float) -> None:
        """Begin all windows anew, with the answers of the requests that are assigned: after a policy or a snapshot, and
        while no decisions are made."""
        for index, window in enumerate(self._windows):
            window.restart(now_ms, self._answering(index))

    def rest(self, now_ms: float, now: datetime) -> None:
        """Judge the windows that are over on an engine without requests, which sends no reports. Windows keep their
        length, so the levels do not depend on how often the method is called."""
        if self._table.live.any():
            return
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

    def judge(self, now_ms: float, now: datetime) -> list[int]:
        """Compare the values of windows that are over with the targets; return the slots of the live requests whose
        stage changes. The table must not have taken in the next report yet."""
        over = [index for index, window in enumerate(self._windows) if window.is_over(now_ms)]
        if not over:
            self._follow_clock(now_ms)
            return []
        before = {slot: self.stages(slot) for slot in self._table.slots().tolist()}
        for index in over:
            self._judge(index, now_ms, now)
            self._windows[index].restart(now_ms, self._answering(index))
        return [slot for slot, stages in before.items() if stages != self.stages(slot)]

    def _follow_clock(self, now_ms: float) -> None:
        """Begin the windows anew if the wall clock was set back."""
        for window in self._windows:
            window.start_ms = min(window.start_ms, now_ms)

    def _judge(self, index: int, now_ms: float, now: datetime) -> None:
        window, entry = self._windows[index], self.entries[index]
        readings = self.readings[entry.name] = window.readings(self._waiting_ms(index, now_ms))
        self.missed.update((entry.name, reading.target) for reading in readings if reading.missed)
        self._decide(entry, readings, now)
        self._choose(index)

    def _decide(self, entry: PressurePolicy, readings: list[Reading], now: datetime) -> None:
        controller = self._controllers[entry.name]
        before = controller.level
        if (level := controller.judge(readings)) == before:
            return
        change = LevelChange(entry.name, now, before, level, worst(readings), entry.shadow)
        self.changes.setdefault(entry.name, deque(maxlen=CHANGES)).appendleft(change)
        self._unlogged.append(change)
        self.counts[entry.name, "shortened" if level > before else "restored"] += 1

    def _answering(self, index: int) -> int:
        """Return the number of live requests of an entry that have begun their answer."""
        mine = self._table.live[: len(self._members)] & (self._members >> index & 1).astype(bool)
        return int(np.count_nonzero(mine & self._answered))

    def _choose(self, index: int) -> None:
        """Choose the half of the entry's thinking requests that gain least from more thinking, if its level treats
        requests differently. A request that is chosen stays so until the level changes to one that does not."""
        bit, size = 1 << index, len(self._members)
        if not self._controllers[self.entries[index].name].level % 2:
            self._first &= ~bit
            return
        table = self._table
        slots = (table.live[:size] & (table.phase[:size] == THINK) & ((self._members & bit) != 0)).nonzero()[0]
        others = slots[(self._first[slots] & bit) == 0]
        wanted = (len(slots) + 1) // 2 - (len(slots) - len(others))
        if wanted > 0:
            self._first[least_gain_first(table, others)[:wanted]] |= bit
