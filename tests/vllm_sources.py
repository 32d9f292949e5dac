"""Check whether a vLLM has every hook that the agent needs, from its sources, without importing them.

`python -m tests.vllm_sources [--save] PATH`: PATH is a wheel, or a folder that holds the package `vllm`. The program
prints the missing names as JSON and fails if there are any; `--save` keeps the result in tests/data/matrix. The table
of names is that of the check at start-up, `meridian_agent/vllm_adapter/required_api.py`.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from meridian_agent.vllm_adapter import required_api
from meridian_agent.vllm_adapter.required_api import missing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meridian_agent.vllm_adapter.required_api import Table

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = ast.ClassDef | ast.Module | Function

P = inspect.Parameter


class Sources:
    """Looks up names in the sources of one vLLM; see `needs.Look`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._wheel = zipfile.ZipFile(path) if path.suffix == ".whl" else None

    def version(self) -> str:
        """Return the version in the dist-info of the wheel or the folder."""
        folders = self._wheel.namelist() if self._wheel else [p.name for p in self._path.iterdir()]
        found = {n.split("-")[1] for n in folders if n.startswith("vllm") and ".dist-info" in n.split("/")[0]}
        return ", ".join(sorted({name.removesuffix(".dist").partition("+")[0] for name in found}))

    def has_owner(self, owner: str) -> bool:
        return self._find(owner) is not None

    def has(self, owner: str, name: str) -> bool:
        found = self._find(owner)
        if found is None:
            return False
        return _member(found, name) is not None or any(self.has(base, name) for base in self._bases(owner, found))

    def signature(self, owner: str, name: str) -> inspect.Signature | None:
        found = self._find(owner)
        if found is None:
            return None
        function = self._find(f"{owner}:{name}") if isinstance(found, ast.Module) else _member(found, name)
        if isinstance(function, Function):
            bound = isinstance(found, ast.ClassDef) and "staticmethod" not in _decorators(function)
            return _signature(function, bound)
        if name == "__init__" and isinstance(found, ast.ClassDef) and "dataclass" in _decorators(found):
            return _fields_signature(found)
        inherited = (self.signature(base, name) for base in self._bases(owner, found))
        return next((signature for signature in inherited if signature is not None), None)

    def _find(self, owner: str) -> Definition | None:
        module, _, name = owner.partition(":")
        tree = self._module(module)
        if tree is None or not name:
            return tree
        for node in tree.body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
                return node
        elsewhere = _imported_from(tree, self._package(module), name)
        return self._find(elsewhere) if elsewhere else None

    @functools.cache  # noqa: B019
    def _module(self, module: str) -> ast.Module | None:
        text = self._read(f"{module.replace('.', '/')}.py") or self._read(f"{module.replace('.', '/')}/__init__.py")
        return ast.parse(text) if text else None

    def _read(self, path: str) -> str:
        try:
            return self._wheel.read(path).decode() if self._wheel else (self._path / path).read_text()
        except (KeyError, FileNotFoundError):
            return ""

    def _package(self, module: str) -> str:
        """Return the package to which a relative import in this module refers."""
        return module if self._read(f"{module.replace('.', '/')}/__init__.py") else module.rpartition(".")[0]

    def _bases(self, owner: str, found: Definition) -> Iterator[str]:
        module = owner.partition(":")[0]
        bases = found.bases if isinstance(found, ast.ClassDef) else ()
        # A generic class is inherited with its parameters.
        for base in (base.value if isinstance(base, ast.Subscript) else base for base in bases):
            if isinstance(base, ast.Name):
                here = f"{module}:{base.id}"
                if self.has_owner(here):
                    yield here


def _imported_from(tree: ast.Module, package: str, name: str) -> str | None:
    """Return the owner from which a module imports this name, or None."""
    for node in (n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)):
        for alias in node.names:
            if (alias.asname or alias.name) == name:
                above = package.rsplit(".", node.level - 1)[0] if node.level else ""
                return f"{'.'.join(filter(None, (above, node.module)))}:{alias.name}"
    return None


def _member(owner: Definition, name: str) -> ast.AST | None:
    """Return a function, field or attribute of this name; of several definitions the last one."""
    found: ast.AST | None = None
    for node in owner.body:
        if (isinstance(node, Function) and node.name == name) or name in _assigned(node):
            found = node
        elif isinstance(node, Function) and node.name == "__init__" and found is None:
            found = next((n for n in ast.walk(node) if f"self.{name}" in _assigned(n)), None)
    return found


def _assigned(node: ast.AST) -> list[str]:
    targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets if isinstance(node, ast.Assign) else []
    flat = [e for t in targets for e in (t.elts if isinstance(t, ast.Tuple) else [t])]
    return [ast.unparse(target) for target in flat]


def _decorators(node: ast.ClassDef | Function) -> set[str]:
    return {ast.unparse(d.func if isinstance(d, ast.Call) else d).rpartition(".")[2] for d in node.decorator_list}


def _signature(function: Function, bound: bool) -> inspect.Signature:
    """Return the signature that `inspect` gives for a callable, without the first argument of a method."""
    a = function.args
    plain = [*((x, P.POSITIONAL_ONLY) for x in a.posonlyargs), *((x, P.POSITIONAL_OR_KEYWORD) for x in a.args)]
    optional = len(plain) - len(a.defaults)
    found = [P(x.arg, kind, default=P.empty if i < optional else None) for i, (x, kind) in enumerate(plain)]
    found = found[1:] if bound else found
    if a.vararg:
        found.append(P(a.vararg.arg, P.VAR_POSITIONAL))
    for x, default in zip(a.kwonlyargs, a.kw_defaults, strict=True):
        found.append(P(x.arg, P.KEYWORD_ONLY, default=P.empty if default is None else None))
    if a.kwarg:
        found.append(P(a.kwarg.arg, P.VAR_KEYWORD))
    return inspect.Signature(found)


def _fields_signature(owner: ast.ClassDef) -> inspect.Signature:
    """Return the signature of the constructor that a dataclass gets."""
    fields = [n for n in owner.body if isinstance(n, ast.AnnAssign) and "ClassVar" not in ast.unparse(n.annotation)]
    return inspect.Signature(
        [
            P(ast.unparse(n.target), P.POSITIONAL_OR_KEYWORD, default=P.empty if n.value is None else None)
            for n in fields
        ]
    )


def tables(version: str) -> list[Table]:
    """Return the tables of the names that the agent needs of this version of vLLM, those included without which it only
    does less."""
    api = required_api
    found = [api.ENGINE, api.CONNECTOR, api.V1_RUNNER, api.V2_RUNNER, api.API_SERVER, api.FRONT_END, api.BALANCER]
    found += [api.RENDERER, api.INPUTS, api.WITH_USER, api.BUDGET, api.HAND_OVER, api.METRICS, api.STOP_STRINGS]
    found += [api.PREEMPTION, api.RAY, api.CORE_SHUTDOWN]
    since = tuple(map(int, version.split(".")[:2]))
    if since >= api.PREMATURE_STOPS_FROM:
        found.append(api.PREMATURE_STOPS)
    if since >= api.PROBE_ROWS_FROM:
        found += [api.PROBE_ROWS, api.V1_PROBE_ROWS, api.V2_PROBE_ROWS]
    return found


def main() -> None:
    from tests.engine.matrix import results

    *options, path = sys.argv[1:]
    sources = Sources(Path(path))
    lacking = [name for table in tables(sources.version()) for name in missing(sources, table)]
    fixed = [name for name, table in required_api.LIMITS.items() if missing(sources, table)]
    print(json.dumps({"vllm": sources.version(), "missing": lacking, "fixed_limits": fixed}))
    if "--save" in options:
        build, name = results.SOURCES
        line = {"vllm": sources.version(), "build": build, "feature": name, "detail": ", ".join(lacking)}
        results.save([{**line, "result": "failed" if lacking else "passed"}])
    sys.exit(bool(lacking))


if __name__ == "__main__":
    main()
