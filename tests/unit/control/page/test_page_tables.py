"""Which rows of a table a viewer gets: those that contain all words, in the order asked for, and at most so many."""

from __future__ import annotations

from typing import Any

import pytest

from meridian_control.page.tables import MAX_FILTER, MAX_ROWS, MAX_TABLES, asked_for, shown

ROWS: list[dict[str, Any]] = [
    {"id": "gpu-b", "kv": 0.5, "why": ["EAT 3", "cap"], "at": None},
    {"id": "gpu-a", "kv": 0.9, "why": [], "at": "2026"},
    {"id": "cpu-c", "kv": 0, "why": ["cap"], "at": ""},
]


async def ids(words: str = "", field: str = "") -> str:
    return " ".join(row["id"] for row in (await shown(ROWS, words.split(), field))["rows"])


@pytest.mark.parametrize(
    ("words", "field", "left"),
    [
        ("", "", "gpu-b gpu-a cpu-c"),
        ("gpu", "", "gpu-b gpu-a"),
        ("cap gpu", "", "gpu-b"),
        ("eat", "", "gpu-b"),
        ("none", "", ""),
        ("", "id", "cpu-c gpu-a gpu-b"),
        ("", "-kv", "gpu-a gpu-b cpu-c"),
        ("", "kv", "cpu-c gpu-b gpu-a"),
        # Rows without a value come last in both orders.
        ("", "at", "gpu-a gpu-b cpu-c"),
        ("", "-at", "gpu-a gpu-b cpu-c"),
        ("", "-nothing", "gpu-b gpu-a cpu-c"),
    ],
)
async def test_rows_are_filtered_and_sorted(words: str, field: str, left: str) -> None:
    assert await ids(words, field) == left


async def test_numbers_in_texts_are_sorted_as_numbers() -> None:
    rows = [{"x": text} for text in ("9 → 10", "10 → 11", "gpu-10", "gpu-2", "GPU-2a", "7" * 9999, "")]
    found = [row["x"] for row in (await shown(rows, (), "x"))["rows"]]
    assert found == ["9 → 10", "10 → 11", "7" * 9999, "gpu-2", "GPU-2a", "gpu-10", ""]


async def test_a_viewer_gets_a_bounded_part_and_the_numbers() -> None:
    many = [{"id": f"gpu-{n:05}", "kv": n} for n in range(5000)]
    found = await shown(many, ("gpu-00",), "-kv")
    assert [row["kv"] for row in found["rows"]] == list(range(999, 999 - MAX_ROWS, -1))
    assert (found["all"], found["matching"]) == (5000, 1000)


def test_a_query_names_tables_and_words() -> None:
    asked = asked_for({"engines": "-kv_used", "filter": " GPU  b ", "freezes": ""})
    assert asked == (("gpu", "b"), (("engines", "-kv_used"), ("freezes", "")))
    long = asked_for({"filter": "x" * 1000, **{f"t{n}": "" for n in range(50)}})
    assert (len(long.words[0]), len(long.tables)) == (MAX_FILTER, MAX_TABLES)


async def test_what_the_page_shows_of_a_text_finds_its_row() -> None:
    """A link from a tenant to its requests has the name as the page shows it."""
    rows = [{"tenant": "acme"}, {"tenant": "a\u202ecme\nb"}]
    found = await shown(rows, asked_for({"filter": r"a\u202ecme\nb"}).words, "")
    assert found["rows"] == rows[1:]
