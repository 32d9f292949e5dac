"""Goes through the engines of a large fleet a few at a time, so that reports do not wait until all are done."""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from meridian_control.common.slices import SLICE_ROWS
from meridian_control.fleet.policy_delivery import ENGINES_AT_ONCE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

T = TypeVar("T")


async def in_parts(items: Iterable[T]) -> AsyncIterator[list[T]]:
    """Yield lists of SLICE_ROWS items, which are made while the event loop does other work in between."""
    remaining = iter(items)
    while some := list(islice(remaining, SLICE_ROWS)):
        yield some
        if len(some) == SLICE_ROWS:
            await asyncio.sleep(0)


async def in_turns(engines: Sequence[T]) -> AsyncIterator[T]:
    """Yield each item, and let the event loop do other work after every ENGINES_AT_ONCE items."""
    for number, engine in enumerate(engines):
        if number and number % ENGINES_AT_ONCE == 0:
            await asyncio.sleep(0)
        yield engine
