"""Copies the effort that a client names in OpenAI's or Anthropic's API into the request's sampling parameters, as
`meridian_effort`, because vLLM passes no effort from the API server's process to the engine core.

vLLM's Anthropic API builds chat completion requests, so two classes of requests cover all APIs with an effort. The
module imports neither of them: it wraps a class at once if this process has imported the class's module, and otherwise
when the process imports the module. Engine cores and workers never import these modules, so nothing happens there.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm

from meridian_agent.vllm_adapter import required_api

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

logger = logging.getLogger("vllm.meridian")

EFFORT = "meridian_effort"
METHOD = "to_sampling_params"
UNCOPIED = "meridian: vLLM lacks %s: the effort that its clients name reaches no policy"


def install() -> None:
    """Wrap the request classes of vLLM's API servers, now or when this process imports their modules. Never raises."""
    later = set()
    for owner in required_api.API_SERVER:
        module = owner.partition(":")[0]
        if module in sys.modules:
            _wrap(owner)
        else:
            later.add(module)
    if later:
        sys.meta_path.insert(0, _AfterImport(later))


def say_absent() -> None:
    """Log the request classes that this vLLM does not have, and a missing thinking_token_budget. Runs in the engine
    core, so that the log has each of them once, however many processes the engine has. Never raises."""
    try:
        lacks = [lack for owner in required_api.API_SERVER for lack in _lacks(owner)]
        if lacks:
            logger.warning(UNCOPIED, ", ".join(lacks))
        if lacks := required_api.missing(required_api.Imported(), required_api.BUDGET):
            logger.warning("meridian: vLLM lacks %s: clients' budgets reach no policy", ", ".join(lacks))
    except Exception:
        logger.exception("meridian: vLLM's request classes could not be looked for")


def _lacks(owner: str) -> list[str]:
    """Return what a request class lacks, without importing its module: only the module is looked for if this process
    has not imported it."""
    module = owner.partition(":")[0]
    if module in sys.modules:
        return required_api.missing(required_api.Imported(), {owner: required_api.API_SERVER[owner]})
    return [] if _has_file(vllm.__path__, module) else [module]


def _has_file(roots: Iterable[str], module: str) -> bool:
    _, *parts = module.split(".")
    return any(Path(root, *parts).with_suffix(".py").exists() for root in roots)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Wraps the request classes in the modules that it waits for, each right after the module was imported."""

    def __init__(self, modules: set[str]) -> None:
        self._modules = modules

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
                setattr(spec.loader, "exec_module", _then_wrapping(spec.loader.exec_module))  # noqa: B010
        except Exception:
            logger.exception(
                "meridian: %s is imported as it is: the effort that its clients name reaches no policy", fullname
            )
            return None
        return spec


def _then_wrapping(execute: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    def exec_module(module: ModuleType) -> None:
        execute(module)
        for owner in required_api.API_SERVER:
            if owner.partition(":")[0] == module.__name__ and (lacks := _wrap(owner)):
                logger.warning(UNCOPIED, ", ".join(lacks))

    return exec_module


def _wrap(owner: str) -> list[str]:
    """Wrap the method through which a request becomes sampling parameters; return what the class lacks for it. Never
    raises."""
    module, _, name = owner.partition(":")
    try:
        if lacks := _lacks(owner):
            return lacks
        request_class = getattr(sys.modules[module], name)
        setattr(request_class, METHOD, _copying(getattr(request_class, METHOD)))
    except Exception:
        logger.exception("meridian: %s stays as it is: the effort that its clients name reaches no policy", owner)
    return []


def _copying(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a request's method so that its sampling parameters contain the request's effort."""

    @functools.wraps(original)
    def to_sampling_params(self: Any, *args: Any, **kwargs: Any) -> Any:
        params = original(self, *args, **kwargs)
        try:
            _copy_effort(self, params)
        except Exception:
            # A client may be able to cause the error as often as it likes, so there is no traceback for each.
            logger.debug("meridian: a request's effort was not copied", exc_info=True)
        return params

    return to_sampling_params


def _copy_effort(request: Any, params: Any) -> None:
    """Add a request's effort to its sampling parameters, unless the client has set meridian_effort itself."""
    effort, extra = effort_of(request), params.extra_args or {}
    if effort and EFFORT not in extra:
        # vLLM may use the client's own vllm_xargs as extra_args, and the client's request must stay as it is.
        params.extra_args = {**extra, EFFORT: effort}


def effort_of(request: Any) -> str:
    """Return the effort that a client's request names in its API; empty if it names none. Chat completions have
    reasoning_effort, responses have reasoning.effort."""
    reasoning = getattr(request, "reasoning", None)
    effort = getattr(request, "reasoning_effort", None) or getattr(reasoning, "effort", None)
    return effort if isinstance(effort, str) else ""
