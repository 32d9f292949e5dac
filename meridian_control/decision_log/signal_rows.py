"""Computes the rows with the signals behind decisions that were made at moments within a report.

The table has the values after a report, so a moment's row is the table's row less what came later in the report. The
function is pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from meridian.v1 import agent_pb2

from meridian_control.decisions.history import OUTPUT
from meridian_control.decisions.table_columns import place_of, words_of
from meridian_control.decisions.token_rows import FLAG_END

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from meridian_control.decisions.history import HeldMoments

# Places of columns in a row, in numbers of each column's own size: the columns of `History.counts`; cycles and repeated
# tokens, which are known only at the end of a report; the rows of `History.entropy_sums`; and the columns that have
# their values in the newest row.
COUNTS = slice(4)
REPETITIONS = words_of("loop_period", "repeated_tokens")
SUMS = words_of("entropy_sum", "entropy_window_sum")
PHASE, END_RANK = map(place_of, ("phase", "end_rank"))
NEWEST_SIGNALS = slice(END_RANK, END_RANK + 3)


def rows_at(held: HeldMoments, indices: Sequence[int] | NDArray[np.intp]) -> tuple[bytes, ...]:
    """Return the rows of the moments with these indices, each as SIGNAL_ROW has it."""
    words = held.words.take(indices, axis=0)
    words[:, COUNTS] -= held.later_counts.take(indices, axis=0)
    words.view(np.float64)[:, SUMS] -= held.later_sums.take(indices, axis=1).T
    words[:, REPETITIONS] = 0
    phase, flags, *_ = newest = held.newest.take(indices, axis=1)
    words.view(np.uint32)[:, NEWEST_SIGNALS] = newest[2:].T
    phase[phase > OUTPUT] = agent_pb2.PHASE_UNSPECIFIED
    phase[(flags & FLAG_END) != 0] = OUTPUT
    words.view(np.uint8)[:, PHASE] = phase
    return tuple(row.tobytes() for row in words)
