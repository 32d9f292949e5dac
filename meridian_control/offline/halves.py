"""Divides the requests of a trace into the half on which rules are chosen and the half on which figures are computed.

The division depends on names alone, so all runs agree. The module knows no rule.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from meridian_control.offline.correctness import Judge

# Smallest number of requests, and of groups, that each half must have.
MIN_REQUESTS, MIN_GROUPS = 10, 5


class TooFewRequests(Exception):  # noqa: N818 - the name is the condition
    """A trace has too few requests or groups to calibrate on; the message has the numbers."""


def halved(
    ids: Sequence[str], judge: Judge, split: int
) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.int64]]:
    """Return the judged requests of both halves, and by request the number of its group, or its own number.

    The judged groups, or requests without groups, are ordered by the hashes of their names and divided evenly, because
    there may be few of them. Raises TooFewRequests.
    """
    names, judged = judge.groups or ids, np.flatnonzero(~np.isnan(judge.natural))
    prefix = f"{split} " if split else ""
    hashed = {names[number]: hashlib.sha256(f"{prefix}{names[number]}".encode()).digest() for number in judged}
    ordered = sorted(hashed, key=hashed.__getitem__)
    chosen = set(ordered[: len(ordered) // 2])
    if judge.groups and len(chosen) < MIN_GROUPS:
        sizes = f"there are {len(chosen)}, {len(ordered) - len(chosen)}"
        raise TooFewRequests(f"{MIN_GROUPS} groups of requests are needed in each half; {sizes}")
    first = np.array([names[number] in chosen for number in judged], bool)
    fit, held_out = judged[first], judged[~first]
    if min(len(fit), len(held_out)) < MIN_REQUESTS:
        raise TooFewRequests(f"{MIN_REQUESTS} requests are needed in each half; there are {len(fit)}, {len(held_out)}")
    return fit, held_out, np.unique(names, return_inverse=True)[1]
