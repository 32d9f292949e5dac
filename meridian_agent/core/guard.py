"""The guard: no exception of the agent's reaches vLLM.

Every hook runs through it. A surprise trips it: what it guards steps aside, the engine goes on as stock, one log line
and the next Hello say so. After a rest it may come back, a few times in an hour, then only by a restart of the engine.

An exception's text may quote a request: it stays in this process's log. Other machines are told its type and place.
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

# Characters of a fault; it travels in every Hello.
MAX_FAULT = 1000
# Seconds of rest after the first fault of a window, the second and so on; after one more there is no coming back.
RESTS_S = (10.0, 60.0, 300.0)
WINDOW_S = 3600.0
OURS = "meridian_agent."


def hook(cause: agent_pb2.FaultCause.ValueType) -> Callable[[F], F]:
    """Marks a function that a guard runs: where its exceptions come from. What is not marked counts as OTHER."""

    def marked(function: F) -> F:
        setattr(function, "cause", cause)  # noqa: B010
        return function

    return marked


def cause_name(cause: agent_pb2.FaultCause.ValueType) -> str:
    """As `Hello.faults` and the metric's label have it."""
    return agent_pb2.FaultCause.Name(cause).removeprefix("FAULT_CAUSE_").lower()


def type_and_place(error: BaseException) -> str:
    """An exception as another machine may read it: its type and where it was raised, never its text.

    Names the innermost frame, and the agent's innermost one where that is another.
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
    """Runs hooks until one fails. `on_trip` is then called, and may itself fail without harm.

    off: how the log says what a fault switches off. clock: monotonic seconds.
    """

    def __init__(
        self, off: str = "agent off, vLLM runs as stock", *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        # Why nothing is run now, empty while all is well; the newest there was. Both are told to the control plane.
        self.fault = self.last_fault = ""
        # The newest with the exception's own text, for this process alone.
        self.text = ""
        # How often it came to a fault, by the name of its cause.
        self.faults: Counter[str] = Counter()
        self.on_trip: Callable[[], None] | None = None
        # The engine starts: it has no request that a text could quote, so faults are told in full. What fails now would
        # fail again, so there is no coming back.
        self.starting = False
        self._off, self._clock = off, clock
        self._trips: deque[float] = deque(maxlen=len(RESTS_S) + 1)
        self._back_at = math.inf

    def run(self, hook: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """The hook's result, or None when it failed or an earlier one had.

        What ends the process, or interrupts it at a user's prompt, is not a fault to keep from vLLM: it is passed on.
        But it may have left a hook half done, so that steps aside too.
        """
        if self.fault:
            return None
        try:
            return hook(*args, **kwargs)
        except Exception as error:
            self.trip(hook, error)
            return None
        except BaseException as error:
            self.trip(hook, error)
            raise

    def trip(self, hook: object, error: BaseException) -> None:
        """Step aside. The first fault counts, until it is over; never raises, without memory neither."""
        if self.fault:
            return
        # Nothing is made for this, so that nothing can go wrong with it.
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
        """Count a fault, with what another part's guard tells of it."""
        self.faults[cause] += 1
        self.last_fault = clean(fault, MAX_FAULT) or self.last_fault

    def _rest(self) -> None:
        now = self._clock()
        self._trips.append(now)
        recent = sum(now - trip < WINDOW_S for trip in self._trips)
        returns = not self.starting and recent <= len(RESTS_S)
        self._back_at = now + RESTS_S[recent - 1] if returns else math.inf

    def outlook(self) -> str:
        """How long the fault lasts, in words."""
        if self._back_at == math.inf:
            why = f": {len(RESTS_S) + 1} faults within {WINDOW_S / 60:.0f} minutes" if not self.starting else ""
            return f"until the engine is started again{why}"
        return f"for {self._back_at - self._clock():.0f} s"

    def rest_s(self) -> float:
        """Seconds until it may come back: 0 while all is well or the rest is over, infinite where it stays off."""
        return max(0.0, self._back_at - self._clock()) if self.fault else 0.0

    def switch_off(self, reason: str) -> None:
        """Run nothing any more, whatever comes; not counted as a fault. The reason is told to the control plane."""
        self.fault, self._back_at = clean(reason, MAX_FAULT), math.inf

    def come_back(self) -> bool:
        """Run hooks again if the rest is over; whether they are run."""
        if self.fault and self.rest_s() == 0:
            self.fault, self._back_at = "", math.inf
        return not self.fault
