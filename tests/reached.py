"""Properties whose examples must reach what they are about; small random examples may all stop short of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

# The places that the examples of the property that runs now have reached.
_reached: set[str] = set()


def reached(place: str) -> None:
    """Note that an example has come to a place of its property."""
    _reached.add(place)


def reaches(*places: str) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Let a property fail if none of its examples has come to one of these places. Stands above Hypothesis's `given`.

    A property that is checked only in some of its examples would otherwise pass although none of them was checked.
    """

    def decorate(holds: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(holds)
        def holds_and_reaches(*args: Any, **kwargs: Any) -> None:
            _reached.clear()
            holds(*args, **kwargs)
            assert _reached >= {*places}, f"no example has reached {', '.join({*places} - _reached)}"

        return holds_and_reaches

    return decorate
