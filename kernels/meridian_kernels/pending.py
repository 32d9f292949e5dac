"""Carries results from a GPU: a ring of pinned buffers, and the pending measurement whose results a buffer receives.

A measurement takes a buffer on the caller's thread; another thread may read the result. Importing this module does not
touch a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meridian_kernels.definition import COLUMNS, RowSignals, of_columns
from meridian_kernels.errors import KernelError

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

# Largest number of measurements whose results have not been read. vLLM runs two steps at once, or with pipeline
# parallelism one step per stage.
SLOTS = 16


@dataclass(slots=True)
class Slot:
    """Pinned memory for the columns of one measurement and for the indices of its rows.

    host: [COLUMNS * rows] float32. selected: [rows] int32. copied: event (CuPy's or torch's) after the copy of the
    columns. is_copied: returns whether the event has passed, without waiting. arguments: what the CUDA kernel's launch
    reads; None for torch's operations. use: number of measurements that have used this slot.
    """

    host: NDArray[np.float32]
    selected: NDArray[np.int32]
    copied: Any
    is_copied: Callable[[], bool]
    arguments: Any = None
    use: int = 0


class Ring:
    """A ring of slots, which measurements use in turn."""

    def __init__(self, make: Callable[[int], Slot]) -> None:
        """make: returns a slot, given its number."""
        self._slots = [make(number) for number in range(SLOTS)]
        self._next = 0

    def take(self) -> Slot:
        """Return the slot that was used longest ago. Raises KernelError while the slot's result is still being
        copied."""
        slot = self._slots[self._next]
        if slot.use and not slot.is_copied():
            raise KernelError(f"at most {SLOTS} measurements may be pending; wait for the result of an earlier one")
        self._next = (self._next + 1) % SLOTS
        slot.use += 1
        return slot


class PendingRows:
    """A measurement whose result may still be on its way from the GPU."""

    def __init__(self, slot: Slot, rows: int) -> None:
        self._slot, self._use, self._rows = slot, slot.use, rows

    def result(self) -> RowSignals:
        """Return the signals in the columns of `columns`, which also names the errors."""
        return of_columns(self.columns())

    def columns(self) -> NDArray[np.float32]:
        """Wait for this measurement only and return its columns, as in `of_columns`. Raises KernelError if SLOTS more
        measurements have begun since, because they have reused its buffer."""
        slot = self._slot
        slot.copied.synchronize()
        columns = slot.host[: COLUMNS * self._rows].copy().reshape(COLUMNS, self._rows)
        if slot.use != self._use:
            raise KernelError(f"a result must be read before {SLOTS} more measurements are begun")
        return columns
