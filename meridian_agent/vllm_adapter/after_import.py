"""Wraps classes of vLLM's API servers in the processes that import them, without importing them.

A class is wrapped at once if this process has imported its module, and otherwise when the process imports the module.
Engine cores and workers that never import such a module stay as they are.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import vllm

from meridian_agent.vllm_adapter import required_api

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

logger = logging.getLogger("vllm.meridian")


def wrap(table: required_api.Table, with_wrapper: Callable[[type], None], without: str) -> None:
    """Call `with_wrapper` with each class of a table of required API, now or when this process imports its module.
    Never raises.

    without: what is missing if a class cannot be wrapped, for the log; a class that lacks something stays as it is.
    """
    later = dict[str, list[str]]()
    for owner in table:
        module = owner.partition(":")[0]
        if module in sys.modules:
            _wrap(owner, table, with_wrapper, without)
        elif _exists(module):
            later.setdefault(module, []).append(owner)
        else:
            logger.warning("meridian: vLLM lacks %s: %s", module, without)

    def imported(module: ModuleType) -> None:
        for owner in later[module.__name__]:
            _wrap(owner, table, with_wrapper, without)

    if later:
        sys.meta_path.insert(0, _AfterImport(set(later), imported, without))


def _exists(module: str) -> bool:
    """Return whether vLLM has a module, without importing it; a module of another package counts as present."""
    package, *parts = module.split(".")
    return package != "vllm" or any(Path(root, *parts).with_suffix(".py").exists() for root in vllm.__path__)


def _wrap(owner: str, table: required_api.Table, with_wrapper: Callable[[type], None], without: str) -> None:
    """Wrap one class, whose module this process has imported, or log what the class lacks. Never raises."""
    module, _, name = owner.partition(":")
    try:
        if lacks := required_api.missing(required_api.Imported(), {owner: table[owner]}):
            logger.warning("meridian: vLLM lacks %s: %s", ", ".join(lacks), without)
        else:
            with_wrapper(getattr(sys.modules[module], name))
    except Exception:
        logger.exception("meridian: %s stays as it is: %s", owner, without)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls `imported` with each module that it waits for, right after the module was imported."""

    def __init__(self, modules: set[str], imported: Callable[[ModuleType], None], without: str) -> None:
        self._modules, self._imported, self._without = modules, imported, without

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._modules:
            return None
        # Python searches with this finder again below, and must get no answer then.
        self._modules.discard(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
            if spec is not None and spec.loader is not None:
                setattr(spec.loader, "exec_module", self._then_imported(spec.loader.exec_module))  # noqa: B010
        except Exception:
            logger.exception("meridian: %s is imported as it is: %s", fullname, self._without)
            return None
        return spec

    def _then_imported(self, execute: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._imported(module)

        return exec_module
