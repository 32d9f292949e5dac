"""State has one owner: a live request changes through its own methods only, which a program can check."""

from __future__ import annotations

import ast
from dataclasses import fields
from typing import TYPE_CHECKING

import pytest

from meridian_agent.core.live_request import Cap, Ending, LiveRequest
from tests.processes import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

AGENT = ROOT / "meridian_agent"
OWNER, TRACKER = "core/live_request.py", "core/tracker.py"
SOURCES = [path for path in sorted(AGENT.rglob("*.py")) if path != AGENT / OWNER]
LIVE = {field.name for field in fields(LiveRequest)}
PARTS = {"cap": {field.name for field in fields(Cap)}, "ending": {field.name for field in fields(Ending)}}
# The tracker assigns these itself, because a call for each token would make each step slower.
HOT = {"expected", "own_sentence", "passed", "watch_from"}
# Other objects with attributes of the same names: the object itself in its own methods, and a step's record.
OTHERS = {"self", "record"}
# Methods that change a list or a dict.
CHANGING = {"append", "clear", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update"}


def assigned(source: str) -> Iterator[ast.expr]:
    """Every place that the source assigns, deletes or changes by a method of a list or a dict."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node
        elif (
            isinstance(node, ast.Call)
            and isinstance(method := node.func, ast.Attribute)
            and method.attr in CHANGING
            and isinstance(method.value, ast.Attribute)
            and method.value.attr in {"expected", "kept"}
        ):
            yield method.value


def changes(source: str) -> list[str]:
    """The assignments to an attribute of a live request, of its cap or of its ending."""
    found = []
    for node in assigned(source):
        place: ast.expr = node
        while isinstance(place, ast.Subscript):
            place = place.value
        if not isinstance(place, ast.Attribute):
            continue
        owner = place.value
        name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
        is_live = place.attr in LIVE and name not in OTHERS and not isinstance(owner, ast.Attribute)
        if is_live or place.attr in PARTS.get(name, ()):
            found.append(f"{place.lineno}: {ast.unparse(place)}")
    return found


@pytest.mark.parametrize(
    "source",
    [
        "live.rank = 1",
        "live.ending, live.forced = None, True",
        "live.skipped_steps += 1",
        "live.expected[0] = 7",
        "live.expected.clear()",
        "live.kept.append(block)",
        "del live.cap",
        "tracked[slot].rank = 1",
        "live.cap.reported = True",
        "live.ending.tokens = ()",
        "ending.position += 1",
        "setting.preempted: bool = True",
    ],
)
def test_a_change_is_found(source: str) -> None:
    assert changes(source)


@pytest.mark.parametrize(
    "source",
    ["rank = live.rank", "live.set_rank(1)", "self.tier = 1", "plan.reported = True", "record.preempted = []"],
)
def test_nothing_else_is_found(source: str) -> None:
    assert changes(source) == []


@pytest.mark.parametrize("path", SOURCES, ids=[str(path.relative_to(AGENT)) for path in SOURCES])
def test_a_live_request_changes_through_its_methods(path: Path) -> None:
    found = changes(path.read_text())
    if path == AGENT / TRACKER:
        found = [place for place in found if place.rpartition(".")[2] not in HOT]
    assert found == []


def test_the_tracker_still_assigns_what_it_may() -> None:
    places = {place.rpartition(".")[2] for place in changes((AGENT / TRACKER).read_text())}
    assert places == HOT
