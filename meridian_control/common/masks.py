"""Asks masks of some hundred entries whether any entry or every entry is set.

NumPy's own `any` and `count_nonzero` spend most of their time in Python at this size. The module knows no mask. The
code does no I/O and reads no clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def any_in(mask: NDArray[np.bool_]) -> bool:
    """Return whether any entry of a mask is set, in about a tenth of the time of `mask.any()`."""
    return b"\1" in mask.tobytes()


def all_in(mask: NDArray[np.bool_]) -> bool:
    """Return whether all entries of a mask are set."""
    return b"\0" not in mask.tobytes()
