"""The real worker observer over simulated model runners of each kind, with a fault at each line that it runs.

Logits are torch tensors and sampling is real. Steps have drafts or none, and signals are requested for all rows, for
some, or for none.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch

from meridian_agent import install
from meridian_agent.core import guard as guard_module
from meridian_agent.core import probe_admission  # noqa: F401 - imported here like `attach`
from meridian_agent.core.guard import Guard
from meridian_agent.core.step_signals import RESULT, SignalBytes
from meridian_agent.worker import attach  # noqa: F401 - imported here, its module's lines are not counted as the worker's
from meridian_agent.worker import observer as observe_module
from meridian_agent.worker.observer import Observer
from tests.fakes.worker import asked, step, worker
from tests.sim.inject import INJECTED_AT, WORKER, Fault, Injected

VOCABULARY = 50
# Steps of the rest after a fault; a step takes a second of the virtual time.
REST_STEPS = 3
ERRORS = (RuntimeError, MemoryError)
# Excluded requests, drafts and requests of each step: all kinds of step three times, then plain steps until the rest
# after a fault is over.
PLAIN: tuple[frozenset[str] | None, dict[str, list[int]], tuple[str, ...]] = frozenset(), {}, ("a", "b")
STEPS = (
    PLAIN,
    (frozenset("b"), {}, ("a", "b")),
    (frozenset(), {"a": [7]}, ("a", "b")),
    (frozenset("a"), {"a": [7, 7]}, ("a", "b")),
    (None, {}, ("a", "b")),
    (frozenset(), {}, ()),
    (frozenset("x"), {}, ("b",)),
) * 3 + (PLAIN,) * (REST_STEPS + 2)


class Kind(NamedTuple):
    """A kind of worker."""

    v2: bool = False
    later: bool = False
    device: str = "cpu"


KINDS = (Kind(), Kind(later=True), Kind(v2=True), Kind(v2=True, later=True), Kind(device="xpu"), Kind(device="cuda"))


@dataclass
class Served:
    """The results of a worker's steps: sampled tokens, messages to the engine core, log lines, and the observer's
    faults.

    injected: None if there is no agent.
    """

    injected: Injected | None
    sampled: list[list[int]] = field(default_factory=list)
    told: list[SignalBytes | str | None] = field(default_factory=list)
    logged: list[str] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)


def served(kind: Kind, injected: Injected | None) -> Served:
    """Run the steps on a worker of this kind, with an agent that meets `injected`, or without one if it is None."""
    found, clock = Served(injected), [0.0]

    class Wrapper:
        def init_device(self) -> None:
            self.worker = worker(kind.device, v2=kind.v2, later=kind.later)
            self.worker.load_model = lambda: None
            self.worker.initialize_from_config = lambda: None

    if injected is not None:
        install._wrap_worker(Wrapper)

    def serve() -> None:
        wrapper = Wrapper()
        wrapper.init_device()
        wrapper.worker.load_model()
        wrapper.worker.initialize_from_config()
        for output in _outputs(wrapper.worker):
            clock[0] += 1
            found.sampled.append(output.sampled)
            found.told.append(getattr(output, RESULT, None))
        for guard in _guards(wrapper.worker):
            found.faults += guard.faults

    with pytest.MonkeyPatch.context() as patch, _heard(found.logged):
        patch.setattr(guard_module, "RESTS_S", (float(REST_STEPS),) * 3)
        patch.setattr(observe_module, "Guard", functools.partial(Guard, clock=lambda: clock[0]))
        if injected is None:
            serve()
        else:
            injected.traced(WORKER, serve)
    return found


def _outputs(own: Any) -> Iterator[Any]:
    random = torch.Generator().manual_seed(3)
    for excluded_ids, drafts, requests in STEPS:
        rows = sum(1 + len(drafts.get(r, ())) for r in requests)
        output = step(own, asked(torch.randn(rows, VOCABULARY, generator=random), excluded_ids, **drafts), requests)
        yield output.get_output() if hasattr(output, "get_output") else output


def _guards(own: Any) -> tuple[Any, ...]:
    """Return the guards of the observer of this worker's runner, if there is one."""
    cells = getattr(own.model_runner.sample_tokens, "__closure__", None) or ()
    observers = [c.cell_contents for c in cells if isinstance(c.cell_contents, Observer)]
    return tuple(guard for one in observers for guard in (one.guard, one.delivery))


class _heard(logging.Handler):  # noqa: N801
    """Collects the log lines inside the block, errors with their texts."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__(logging.DEBUG)
        self._lines, self._logger = lines, logging.getLogger("vllm.meridian")

    def __enter__(self) -> None:
        self._before = self._logger.handlers, self._logger.filters, self._logger.propagate, self._logger.level
        # The filter of the agent's log would leave most of so many lines out.
        self._logger.handlers, self._logger.filters, self._logger.propagate = [self], [], False
        self._logger.setLevel(logging.DEBUG)

    def __exit__(self, *_: object) -> None:
        self._logger.handlers, self._logger.filters, self._logger.propagate, level = self._before
        self._logger.setLevel(level)

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(f"{record.getMessage()} {record.exc_info[1] if record.exc_info else ''}")


class Case(NamedTuple):
    """A kind of worker and the fault in it."""

    kind: Kind
    fault: Fault

    def __str__(self) -> str:
        return f"{self.fault} on {self.kind}"


def cases() -> list[Case]:
    """Return cases for each line that is reached, in each kind of worker that reaches it, at the first and the third
    time.

    The kinds of error alternate.
    """
    errors = itertools.cycle(ERRORS)
    found = []
    for kind in KINDS:
        injected = _unharmed(kind)[1].injected
        assert injected is not None
        places = [(line, n) for line, times in sorted(injected.reached.items()) for n in (1, 3) if n <= times]
        found += [Case(kind, Fault(line, n, next(errors))) for line, n in places]
    return found


@functools.cache
def _unharmed(kind: Kind) -> tuple[Served, Served]:
    """Return the results without an agent, and with an agent that meets no fault."""
    stock = served(kind, None)
    # The first run also imports modules, and lines that the agent runs in imports are not reached again.
    served(kind, Injected(Fault(None)))
    return stock, served(kind, Injected(Fault(None)))


def broken(case: Case) -> str:
    """Return what this case violates, or an empty string."""
    stock, whole = _unharmed(case.kind)
    found = served(case.kind, Injected(case.fault))
    assert found.injected is not None
    checks = {
        "the line was not reached": found.injected.raised,
        "other tokens were sampled": found.sampled == stock.sampled,
        "signals are not those of their step": all(_same(*pair) for pair in zip(found.told, whole.told, strict=True)),
        "the log does not name the fault": any("injected" in line for line in found.logged),
        **({} if _at_start(found) else _in_service(found, whole)),
    }
    return next((f"{case}: {text}" for text, holds in checks.items() if not holds), "")


def _at_start(found: Served) -> bool:
    """Return whether the fault kept the worker from being observed at all, which only its log shows."""
    return not found.faults


def _in_service(found: Served, whole: Served) -> dict[str, bool]:
    return {
        "it was not counted once": found.faults.total() == 1,
        "the engine core was not told": any(INJECTED_AT in said for said in found.told if isinstance(said, str)),
        "it did not come back": found.told[-1] == whole.told[-1],
    }


def _same(said: SignalBytes | str | None, whole: SignalBytes | str | None) -> bool:
    """Return whether a step has its own signals or none."""
    return said is None or isinstance(said, str) or said == whole
