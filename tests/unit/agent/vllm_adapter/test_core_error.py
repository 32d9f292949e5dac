"""Which errors count as the end of vLLM's engine core: those that its main function handles, unless it is to end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

from meridian_agent.vllm_adapter.core_error import core_fails


class State(Enum):
    """The names of vLLM's EngineShutdownState."""

    RUNNING, REQUESTED, SHUTTING_DOWN = range(3)


def run_engine_core(core: Any, error: BaseException, found: list[bool]) -> None:
    """Shut down as vLLM's function of this name does, whose signal handler uses the variable, too."""
    engine_core = core

    def handler() -> Any:
        return engine_core

    try:
        raise error
    finally:
        found.append(core_fails())
        assert handler() is core


def script(core: Any, error: BaseException, found: list[bool]) -> None:
    """Shut down in an error of a program that has the core in its process."""
    try:
        raise error
    finally:
        found.append(core_fails())


RUNNING = SimpleNamespace(shutdown_state=State.RUNNING)


@pytest.mark.parametrize(
    ("where", "core", "error", "fails"),
    [
        (run_engine_core, RUNNING, RuntimeError("CUDA error"), True),
        (run_engine_core, SimpleNamespace(), RuntimeError("CUDA error"), True),
        (run_engine_core, SimpleNamespace(), SystemExit(), False),
        (run_engine_core, RUNNING, KeyboardInterrupt(), False),
        (run_engine_core, SimpleNamespace(shutdown_state=State.REQUESTED), RuntimeError("cancelled"), False),
        (run_engine_core, SimpleNamespace(shutdown_state=State.SHUTTING_DOWN), RuntimeError("cancelled"), False),
        (script, RUNNING, ValueError("no such file"), False),
    ],
)
def test_which_error_ends_the_core(where: Callable[..., None], core: Any, error: BaseException, fails: bool) -> None:
    found: list[bool] = []
    with suppress(BaseException):
        where(core, error, found)
    assert found == [fails]
    assert not core_fails()
