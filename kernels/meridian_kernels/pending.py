"""Results on their way from a GPU: pinned buffers that are used in turn, and the measurement that one of them carries.

A measurement takes a slot on the caller's thread; its result may be read on another. Importing this touches no GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from meridian_kernels.definition import RowSignals
from meridian_kernels.errors import KernelError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

COLUMNS = 6
# Measurements whose results may be outstanding; vLLM has two steps under way, with pipeline parallelism one per stage.
SLOTS = 16


@dataclass(slots=True)
class Slot:
    """Pinned memory for the columns of one measurement and for the numbers of its rows.

    host: [COLUMNS * rows] float32. selected: [rows] int32. copied: event after the copy of the columns, CuPy's or
    torch's. is_copied: whether the event has passed; does not wait. use: how many measurements this slot has carried.
    """

    host: NDArray[np.float32]
    selected: NDArray[np.int32]
    copied: Any
    is_copied: Callable[[], bool]
    use: int = 0


class Ring:
    """Slots that measurements take in turn."""

    def __init__(self, make: Callable[[], Slot]) -> None:
        self._slots = [make() for _ in range(SLOTS)]
        self._next = 0

    def take(self) -> Slot:
        """The slot that was used longest ago. Raises KernelError while its result is still being copied."""
        slot = self._slots[self._next]
        if slot.use and not slot.is_copied():
            raise KernelError(f"{SLOTS} measurements are under way")
        self._next = (self._next + 1) % SLOTS
        slot.use += 1
        return slot


class PendingRows:
    """A measurement under way."""

    def __init__(self, slot: Slot, rows: int) -> None:
        self._slot, self._use, self._rows = slot, slot.use, rows

    def result(self) -> RowSignals:
        """Wait for this measurement alone. Raises KernelError when SLOTS others were begun since."""
        slot = self._slot
        slot.copied.synchronize()
        columns = slot.host[: COLUMNS * self._rows].copy().reshape(COLUMNS, self._rows)
        if slot.use != self._use:
            raise KernelError(f"a result must be read before {SLOTS} more measurements are begun")
        return RowSignals(*columns[:4], *columns[4:].view(np.int32))
