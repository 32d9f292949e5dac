"""Faults inside the agent: an exception at any of its lines that a run reaches, raised just before the line runs.

Lines are counted where the guard runs them, on the engine's thread, and where the link's thread would run them. Left
out are the guard itself, the log's, and code that only passes vLLM's own call on (`GLUE`), because an exception there
would be the interpreter's or vLLM's.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any, TypeAlias

import meridian_agent
from meridian_agent.core import guard as guard_module
from meridian_agent.core.guard import Guard

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    import pytest

HERE = str(Path(meridian_agent.__file__).parent)
GLUE = {
    "core/guard.py": (),
    "core/plain_log.py": (),
    "engine/scheduler_mixin.py": (
        "add_request",
        "finish_requests",
        "schedule",
        "get_grammar_bitmask",
        "update_from_output",
        "_preempt_request",
        "_free_request_blocks",
        "_settle_fault",
    ),
    "vllm_adapter/prefix_cache.py": ("record_unless_hidden", "get_computed_blocks"),
    "install.py": ("init_device", "call"),
    "worker/attach.py": ("observed_execute", "observed_sample", "watched", "with_signals"),
    "worker/observer.py": ("come_back",),
    "plugin.py": ("register",),
}
# The hooks that run while the agent is built.
STARTING = ("ungovernable", "_begin")
ENGINE, LINK, WORKER = "engine", "link", "worker"
# Part of the text with which the control plane is told of such a fault.
INJECTED_AT = f" at {__name__}:"
# The thread that runs the line, the file, and the line's number.
Line: TypeAlias = tuple[str, str, int]


@dataclass(frozen=True)
class Fault:
    """A fault, raised when `line` is reached for the `nth` time; a line of None raises no fault.

    early: number of a hook in the run that fails in any case, so that the code after a fault is reached too, or None.
    at_start: raise the fault while the agent is built instead of in its hooks.
    """

    line: Line | None = None
    nth: int = 1
    error: type[BaseException] = RuntimeError
    early: int | None = None
    at_start: bool = False

    def __str__(self) -> str:
        assert self.line is not None
        side, file, line = self.line
        nth = f", time {self.nth}" if self.nth > 1 else ""
        return f"{self.error.__name__} at {file}:{line} ({side}){nth}"


class Injected:
    """The faults of one run. `reached` counts how often each line ran in the guard or on the link's thread."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.reached: Counter[Line] = Counter()
        self.raised = False
        # Whether the hook that fails in any case has failed; it stays False if the line's fault came first.
        self.was_early = False
        self._hooks = 0
        self._side = ENGINE

    def install(self, patch: pytest.MonkeyPatch, rests_s: tuple[float, ...]) -> None:
        patch.setattr(guard_module, "RESTS_S", rests_s)
        run, thread = Guard.run, threading.get_ident()

        def traced(guard: Guard, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            # The process may also have a real engine, whose link has a thread of its own.
            is_simulated = threading.get_ident() == thread
            if not is_simulated or self.raised or (hook.__name__ in STARTING) is not self.fault.at_start:
                return run(guard, hook, *args, **kwargs)
            self._hooks += 1
            if self._hooks == self.fault.early:
                self.was_early = True
                return run(guard, _fails)
            return self.traced(ENGINE, run, guard, hook, *args, **kwargs)

        patch.setattr(Guard, "run", traced)

    def on_link(self, work: Callable[..., None], *args: Any) -> None:
        """Do the work of the link's thread at once."""
        if self.raised or self.fault.at_start:
            work(*args)
        else:
            self.traced(LINK, work, *args)

    def traced(self, side: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the result of a call, with its lines counted for this side and the fault raised if its line is
        reached."""
        outer, before = sys.gettrace(), self._side
        self._side = side
        sys.settrace(self._call)
        try:
            return call(*args, **kwargs)
        finally:
            sys.settrace(None if self.raised else outer)
            self._side = before

    def _call(self, frame: FrameType, _event: str, _arg: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(HERE):
            return None
        name = code.co_filename[len(HERE) + 1 :]
        left_out = GLUE.get(name)
        if left_out is not None and (not left_out or code.co_name in left_out):
            return None
        return self._line

    def _line(self, frame: FrameType, event: str, _arg: Any) -> Any:
        if event == "line":
            line = self._side, frame.f_code.co_filename[len(HERE) + 1 :], frame.f_lineno
            self.reached[line] += 1
            if line == self.fault.line and self.reached[line] == self.fault.nth:
                self.raised = True
                raise self.fault.error("injected")
        return self._line


def all_lines() -> set[tuple[str, int]]:
    """Return every line within a function of the agent, by file, except the lines that are left out."""
    found: set[tuple[str, int]] = set()

    def add(code: CodeType, file: str) -> None:
        for inner in (const for const in code.co_consts if isinstance(const, CodeType)):
            left_out = GLUE.get(file)
            if left_out is None or (left_out and inner.co_name not in left_out):
                if inner.co_flags & inspect.CO_NEWLOCALS:
                    found.update((file, line) for *_, line in inner.co_lines() if line and line != inner.co_firstlineno)
                add(inner, file)

    for path in sorted(Path(HERE).rglob("*.py")):
        add(compile(path.read_text(), str(path), "exec"), str(path.relative_to(HERE)))
    return found


def _fails() -> None:
    raise RuntimeError("injected early")
