"""Orders requests by what they gain from more thinking, as far as it is measured. The functions are pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from meridian_control.engine.request_table import RequestTable


def least_gain_first(table: RequestTable, slots: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return the slots, those first whose requests gain least from more thinking.

    A request with EAT samples is compared by their moving mean with the others that have some; of the rest, a request
    with a rank of the end marker at a sentence end is compared by the newest one, and any other by its thinking tokens.
    Low values gain least, and long thinking does. Values of different kinds are not comparable, so each request is
    placed by the share of its kind that gains less than it does; ties are broken by thinking tokens.
    """
    tokens = -table.think_tokens[slots].astype(np.float64)
    kinds = [
        (table.eat_count[slots] > 0, table.eat_ema_nats[slots]),
        (table.boundary_count[slots] > 0, table.boundary_ranks[slots, 0].astype(np.float64)),
        (np.ones(len(slots), bool), tokens),
    ]
    place, left = np.zeros(len(slots)), np.ones(len(slots), bool)
    for has, values in kinds:
        mine = (has & left).nonzero()[0]
        left[mine] = False
        order = mine[np.lexsort((tokens[mine], values[mine]))]
        place[order] = (np.arange(len(order)) + 0.5) / max(1, len(order))
    ordered: NDArray[np.intp] = slots[np.lexsort((tokens, place))]
    return ordered
