"""Computes the rows with the signals behind decisions that were made at moments within reports.

The table has the values after a report, so a moment's row is the table's row less what came later in the report. The
rows of many reports are computed at once, because an array operation costs much more than the few rows of one report.
All functions are pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from meridian.v1 import agent_pb2

from meridian_control.decisions.history import OUTPUT
from meridian_control.decisions.table_columns import END_WORDS, SIGNAL_ROW, place_of, words_of
from meridian_control.decisions.token_rows import FLAG_END

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meridian_control.decisions.history import HeldMoments

ROW_BYTES = SIGNAL_ROW.itemsize
# Places of columns in a row, in numbers of each column's own size: the columns of `History.counts`; cycles and repeated
# tokens, which are known only at the end of a report; the rows of `History.entropy_sums`; and the columns that have
# their values in the newest row.
COUNTS = slice(4)
REPETITIONS = words_of("loop_period", "repeated_tokens")
SUMS = words_of("entropy_sum", "entropy_window_sum")
PHASE, END_RANK = map(place_of, ("phase", "end_rank"))
NEWEST_SIGNALS = slice(END_RANK, END_RANK + 3)


def packed(parts: Sequence[HeldMoments]) -> list[list[bytes]]:
    """Return for each report the rows of its moments, each as SIGNAL_ROW has it."""
    rows, here, over, sums, sums_over, newest, ends = zip(*parts, strict=True)
    words = np.concatenate(rows)
    counts, entropy_sums = words[:, COUNTS], words.view(np.float64)[:, SUMS]
    counts -= np.concatenate(over) - np.concatenate(here)
    entropy_sums -= (np.concatenate(sums_over, axis=1) - np.concatenate(sums, axis=1)).T
    words[:, REPETITIONS] = 0
    phase, flags, *_ = told = np.concatenate(newest, axis=1)
    words.view(np.uint32)[:, NEWEST_SIGNALS] = told[2:].T
    phase[phase > OUTPUT] = agent_pb2.PHASE_UNSPECIFIED
    phase[(flags & FLAG_END) != 0] = OUTPUT
    words.view(np.uint8)[:, PHASE] = phase
    begin = 0
    for own, late in zip(rows, ends, strict=True):
        for index, values, number in late:
            words[begin + index, END_WORDS] = values[number]
        begin += len(own)
    data, end, found = words.tobytes(), 0, []
    for own in rows:
        begin, end = end, end + len(own) * ROW_BYTES
        found.append([data[at : at + ROW_BYTES] for at in range(begin, end, ROW_BYTES)])
    return found
