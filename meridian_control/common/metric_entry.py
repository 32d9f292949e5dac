"""Defines an entry of the catalogue of metrics, and functions that make entries. The functions are pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial


@dataclass(frozen=True, slots=True)
class Entry:
    """A metric under its exposed name. `text` is the metric's help; `act` is how an operator reacts to a value."""

    kind: str
    name: str
    labels: tuple[str, ...]
    text: str
    act: str


counter, gauge, histogram = (partial(Entry, kind) for kind in ("counter", "gauge", "histogram"))
