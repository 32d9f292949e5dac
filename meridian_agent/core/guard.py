"""Keeps every exception of the agent from vLLM.

Every hook of the agent runs through a guard. An exception trips the guard: the agent switches itself off, the engine
goes on as stock vLLM, and one log line and the next Hello give the reason. The agent comes back after a rest, but after
too many faults within an hour only a restart of the engine brings it back.

The text of an exception may quote a request, so it stays in this process's log. Only the exception's type and place
leave the process.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
import traceback
from collections import Counter, deque
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from meridian.v1 import agent_pb2

from meridian_agent.core.request_info import clean

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound="Callable[..., object]")

logger = logging.getLogger("vllm.meridian")

# Largest number of characters of a fault, because every Hello carries it.
MAX_FAULT = 1000
# Seconds of rest after the first fault of a window, after the second, and so on; after one more fault the agent stays
# off.
RESTS_S = (10.0, 60.0, 300.0)
WINDOW_S = 3600.0
OURS = "meridian_agent."


def hook(cause: agent_pb2.FaultCause.ValueType) -> Callable[[F], F]:
    """Return a decorator that names the cause under which a function's exceptions are counted. Functions without this
    decorator count as OTHER."""

    def marked(function: F) -> F:
        setattr(function, "cause", cause)  # noqa: B010
        return function

    return marked


def cause_name(cause: agent_pb2.FaultCause.ValueType) -> str:
    """Return the name of a cause, as in `Hello.faults` and in the metric's label."""
    return agent_pb2.FaultCause.Name(cause).removeprefix("FAULT_CAUSE_").lower()


def type_and_place(error: BaseException) -> str:
    """Return an exception's type and the place where it was raised, but not its text, which must not leave the process.

    The place is the innermost frame, followed by the agent's innermost frame if that is another one.
    """
    at = from_agent = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__", "?"))
        if module == __name__:
            continue
        at = f"{module}:{line} ({frame.f_code.co_name})"
        if module.startswith(OURS):
            from_agent = at
    name = type(error).__name__
    if not at:
        return name
    return f"{name} at {at}" + (f", from {from_agent}" if from_agent not in ("", at) else "")


class Guard:
    """Runs hooks until one of them fails. Then calls `on_trip`, which may fail without harm.

    off: text for the log that says what a fault switches off. clock: returns monotonic seconds.
    """

    def __init__(
        self, off: str = "agent off, vLLM runs as stock", *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        # The current fault, empty while hooks are run, and the newest fault so far; Hello carries both faults.
        self.fault = self.last_fault = ""
        # The newest fault with the exception's text, which stays in this process.
        self.text = ""
        # Seconds that hooks have taken.
        self.seconds = 0.0
        # Number of faults by the name of their cause.
        self.faults: Counter[str] = Counter()
        self.on_trip: Callable[[], None] | None = None
        # The engine is starting. A starting engine has no request that an exception could quote, so Hello carries the
        # exception's text too; and the agent stays off after a fault, because the same start would fail again.
        self.starting = False
        self._off, self._clock = off, clock
        # Number of hooks that run.
        self._depth = 0
        self._trips: deque[float] = deque(maxlen=len(RESTS_S) + 1)
        self._back_at = math.inf

    def run(self, hook: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Run a hook and return its result; None if the hook fails or an earlier one has failed.

        Exceptions that end the process, such as KeyboardInterrupt, are raised again. Such exceptions trip the guard
        too, because the hook may be half done.
        """
        if self.fault:
            return None
        began = time.perf_counter()
        self._depth += 1
        try:
            return hook(*args, **kwargs)
        except Exception as error:
            self.trip(hook, error)
            return None
        except BaseException as error:
            self.trip(hook, error)
            raise
        finally:
            self._depth -= 1
            if not self._depth:
                # A hook may call a method of vLLM's that has a hook of its own.
                self.seconds += time.perf_counter() - began

    def trip(self, hook: object, error: BaseException) -> None:
        """Switch off because of a fault. Further faults do not count until this one is over. Never raises, not even if
        memory has run out."""
        if self.fault:
            return
        # This assignment allocates nothing, so it cannot fail.
        self.fault = self.last_fault = "a fault"
        try:
            cause = cause_name(getattr(hook, "cause", agent_pb2.FAULT_CAUSE_OTHER))
            name = str(getattr(hook, "__name__", cause)).lstrip("_")
            self.fault = self.last_fault = clean(f"{name}: {type_and_place(error)}", MAX_FAULT)
            self.text = clean(f"{name}: {type(error).__name__}: {error}", MAX_FAULT)
            if self.starting:
                self.fault = self.last_fault = self.text
            self.note(cause)
            self._rest()
            logger.error("meridian: %s; %s; %s", self._off, self.text, self.outlook(), exc_info=error)
            if self.on_trip is not None:
                self.on_trip()
        except Exception:
            with contextlib.suppress(Exception):
                logger.exception("meridian: could not report the fault")

    def note(self, cause: str, fault: str = "") -> None:
        """Count a fault. fault: description by another guard; empty for this guard's own fault."""
        self.faults[cause] += 1
        self.last_fault = clean(fault, MAX_FAULT) or self.last_fault

    def _rest(self) -> None:
        now = self._clock()
        self._trips.append(now)
        recent = sum(now - trip < WINDOW_S for trip in self._trips)
        returns = not self.starting and recent <= len(RESTS_S)
        self._back_at = now + RESTS_S[recent - 1] if returns else math.inf

    def outlook(self) -> str:
        """Return how long the agent stays off, as text for the log."""
        if self._back_at == math.inf:
            why = f": {len(RESTS_S) + 1} faults within {WINDOW_S / 60:.0f} minutes" if not self.starting else ""
            return f"until the engine is started again{why}"
        return f"for {self._back_at - self._clock():.0f} s"

    def rest_s(self) -> float:
        """Return the seconds until hooks may run again: 0 without a fault or once the rest is over, infinity if the
        agent stays off."""
        return max(0.0, self._back_at - self._clock()) if self.fault else 0.0

    def switch_off(self, reason: str) -> None:
        """Run no hook any more; this does not count as a fault. The next Hello carries the reason."""
        self.fault, self._back_at = clean(reason, MAX_FAULT), math.inf

    def come_back(self) -> bool:
        """Run hooks again if the rest is over; return whether hooks are run."""
        if self.fault and self.rest_s() == 0:
            self.fault, self._back_at = "", math.inf
        return not self.fault
