"""State of the control plane has one owner: only the request table writes its columns."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

import pytest

from meridian_control.common.table_columns import COLUMNS, HISTORIES
from tests.processes import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SOURCES = sorted((ROOT / "meridian_control").rglob("*.py"))
OWNER = ROOT / "meridian_control/engine/request_table.py"
# The columns, and what else the table keeps by slot.
NAMES = {*COLUMNS, *HISTORIES, "window", "info", "slot"}
# Attributes of the table's `history` that are kept by slot.
KEPT = {"sampled", "probed"}
TABLES = {"table", "_table"}
# Methods of arrays and lists that change them in place.
IN_PLACE = {"fill", "put", "sort", "partition", "itemset", "setfield", "append", "extend", "clear"}


def name(node: ast.expr) -> str:
    """The last name of `a.b.name` or `name`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def is_column(node: ast.expr) -> bool:
    """Whether an expression is `table.column`, of any table, or a part of one."""
    while isinstance(node, ast.Subscript):
        node = node.value
    if not isinstance(node, ast.Attribute):
        return False
    if node.attr in KEPT:
        return name(node.value) == "history"
    return node.attr in NAMES and name(node.value) in TABLES


def targets(node: ast.AST) -> Iterator[ast.expr]:
    """The expressions that a statement or a call writes to."""
    found: list[ast.expr] = []
    if isinstance(node, ast.Assign | ast.Delete):
        found = list(node.targets)
    elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For):
        found = [node.target]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        found = [keyword.value for keyword in node.keywords if keyword.arg == "out"]
        found += [node.func.value] if node.func.attr in IN_PLACE else []
        # ufunc.at, np.copyto, np.put, np.place and np.putmask write to their first argument.
        found += node.args[:1] if node.func.attr in {"at", "copyto", "put", "place", "putmask"} else []
    for target in found:
        yield from target.elts if isinstance(target, ast.Tuple | ast.List) else [target]


def writes(source: str) -> list[str]:
    """The statements and calls that write a column."""
    nodes = ast.walk(ast.parse(source))
    return [ast.unparse(node) for node in nodes if any(is_column(target) for target in targets(node))]


@pytest.mark.parametrize(
    "source",
    [
        "table.rank[slots] = ranks",
        "self._table.tier[:] = 0",
        "session.table.ended[slot], other = (True, 1)",
        "table.shadow_decided[slot] |= 1",
        "table.live = live",
        "np.add.at(table.entropy_sum, slot, nats)",
        "np.add(a, b, out=table.entropy_sum)",
        "table.window[slot].fill(0)",
        "table.history.probed[slot] = step",
        "del table.info[slot]",
    ],
)
def test_a_write_is_found(source: str) -> None:
    assert writes(source) == [source]


@pytest.mark.parametrize("source", ["now = table.live & seen", "now &= mask", "found.live = mine", "view.tier[0] = 1"])
def test_what_only_reads_columns_is_none(source: str) -> None:
    assert writes(source) == []


@pytest.mark.parametrize("path", SOURCES, ids=[str(path.relative_to(ROOT)) for path in SOURCES])
def test_only_the_table_writes_its_columns(path: Path) -> None:
    assert path == OWNER or writes(path.read_text()) == []
