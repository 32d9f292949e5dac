"""Changes of one function, as mutmut and cosmic-ray make them: a condition negated, a statement left out, a number
raised, a comparison shifted, a result lost. The module knows no function by its text."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGES = ("meridian_agent", "meridian_control", "kernels")
OPPOSITE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
LEFT_OUT = (ast.Assign, ast.AugAssign, ast.Delete, ast.Raise)
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Mutant(NamedTuple):
    """One change. what: its line and kind. source: the whole module with it."""

    what: str
    source: str


def path_of(function: str) -> Path:
    """Return the module that has a function, as a path in the repository.

    function: its qualified name, after the module's name if several modules have such a function. Raises ValueError
    unless exactly one module has it.
    """
    defined = f"def {function.rpartition('.')[2]}("
    found = [
        path.relative_to(ROOT)
        for path, source in _sources().items()
        if defined in source and _find(ast.parse(source), path.stem, function) is not None
    ]
    if len(found) != 1:
        raise ValueError(f"{function}: {len(found)} modules have it")
    return found[0]


@cache
def _sources() -> dict[Path, str]:
    return {path: path.read_text() for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}


def mutants(source: str, module: str, function: str) -> Iterator[Mutant]:
    """Yield every change of a function. module: its module's name."""
    body = _find(ast.parse(source), module, function)
    assert body is not None
    for place, node in enumerate(ast.walk(body)):
        for what, _ in _changes(node):
            tree = ast.parse(source)
            changed = _find(tree, module, function)
            assert changed is not None
            dict(_changes(list(ast.walk(changed))[place]))[what]()
            yield Mutant(f"line {getattr(node, 'lineno', body.lineno)}, {what}", ast.unparse(tree))


def _find(tree: ast.Module, module: str, function: str) -> Function | None:
    def within(node: ast.AST, name: str) -> Iterator[tuple[str, Function]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | Function):
                own = f"{name}.{child.name}".removeprefix(".")
                if isinstance(child, Function):
                    yield own, child
                yield from within(child, own)
            else:
                yield from within(child, name)

    return next((node for name, node in within(tree, "") if function in (name, f"{module}.{name}")), None)


def _changes(node: ast.AST) -> list[tuple[str, Callable[[], None]]]:
    """Return the changes of one node, each with a function that makes it."""

    def replace(field: str, value: object) -> Callable[[], None]:
        return lambda: setattr(node, field, value)

    found: list[tuple[str, Callable[[], None]]] = []
    if isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(node.test, ast.Compare):
        found.append(("the condition negated", replace("test", ast.UnaryOp(ast.Not(), node.test))))
    if isinstance(node, ast.Compare):
        found.append(("the comparison shifted", replace("ops", [OPPOSITE[type(node.ops[0])](), *node.ops[1:]])))
    if isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        found.append(("and in place of or, or the reverse", replace("op", other)))
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        value = not node.value if isinstance(node.value, bool) else node.value + 1
        found.append(("another constant", replace("value", value)))
    if isinstance(node, ast.Return) and not isinstance(node.value, ast.Constant | None):
        found.append(("None returned", replace("value", ast.Constant(None))))
    for field in ("body", "orelse", "finalbody"):
        block = getattr(node, field, None)
        for at, statement in enumerate(block if isinstance(block, list) else ()):
            called = isinstance(statement, ast.Expr) and not isinstance(statement.value, ast.Constant)
            if called or isinstance(statement, LEFT_OUT):
                rest = [*block[:at], ast.Pass(), *block[at + 1 :]]  # type: ignore[index]
                found.append((f"the statement of line {statement.lineno} left out", replace(field, rest)))
    return found
