"""Chooses which rows of a table a viewer of the status page gets: filtered, sorted, and at most so many.

A viewer asks for tables by name, because a fleet may have thousands of engines and requests. The module knows rows only
as plain data. The event loop does other work while `shown` looks at many rows.
"""

from __future__ import annotations

import re
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from meridian_control.common.plain_text import printable
from meridian_control.fleet.turns import in_turns

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

# Largest number of rows that a viewer gets of a table.
MAX_ROWS = 200
# Longest text of a filter, and largest number of tables that a viewer asks for.
MAX_FILTER, MAX_TABLES = 200, 8


class Asked(NamedTuple):
    """What a viewer asks for: the words that each row must contain, in lower case, and the tables with the field that
    sorts each; a minus before the field reverses the order, and no field leaves the rows as they are."""

    words: tuple[str, ...] = ()
    tables: tuple[tuple[str, str], ...] = ()


def asked_for(query: Mapping[str, str]) -> Asked:
    """Return what the parameters of a query ask for: `filter`, and each table by its name with its sorting field."""
    words = query.get("filter", "")[:MAX_FILTER].lower().split()
    tables = [(name, field) for name, field in query.items() if name != "filter"]
    return Asked(tuple(words), tuple(tables[:MAX_TABLES]))


async def shown(rows: Sequence[dict[str, Any]], words: Sequence[str], field: str) -> dict[str, Any]:
    """Return the rows that a viewer gets, the number of rows, and the number of those that contain all words as
    the page shows them."""
    matching = [row async for row in in_turns(rows) if _contains(row, words)] if words else list(rows)
    name, reverse = field.removeprefix("-"), field.startswith("-")
    if name:
        known = (row for row in matching if row.get(name) not in (None, ""))
        ordered = [(place_of(row[name]), row) async for row in in_turns(known)]
        ordered.sort(key=itemgetter(0), reverse=reverse)
        # Rows without a value come last in both orders.
        matching = [row for _, row in ordered] + [row for row in matching if row.get(name) in (None, "")]
    return {"rows": matching[:MAX_ROWS], "all": len(rows), "matching": len(matching)}


def place_of(value: Any) -> tuple[bool, float, list[str | int]]:
    """Return the place of a value among others; numbers come before texts, and in texts `gpu-2` before `gpu-10`."""
    if isinstance(value, (int, float)):
        return False, float(value), []
    parts = re.split("([0-9]{1,18})", str(value).lower())
    return True, 0.0, [int(part) if at % 2 else part for at, part in enumerate(parts)]


def _contains(row: dict[str, Any], words: Sequence[str]) -> bool:
    text = "\n".join(_texts(row)).lower()
    return all(word in text for word in words)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from _texts(part)
    elif value is not None:
        yield printable(str(value))
