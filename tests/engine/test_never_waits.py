"""The engine's steps never wait for the agent's link: the tests check which functions hooks call, not their time.

A profile of the engine's thread sees every C function that a hook calls, on however busy a machine. Waiting takes one
of these: a lock, a queue, a sleep, a poll, a file or a socket. One lock is allowed: the mailbox's, which the link's
thread holds only while it notes a message. `test_inner_faults` has an engine that serves while the link's thread stands
still for ever.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from types import FrameType, ModuleType
from typing import Any

import pytest

from tests.engine import Run, cases
from tests.engine.policies import DENSE
from tests.engine.test_decisions import endless, opened
from tests.processes import Control

# Owners of functions that may wait, except for the functions in NEVER_WAIT.
WAITING = (
    "_thread.",
    "_queue.",
    "time.",
    "posix.",
    "io.",
    "_io.",
    "_socket.",
    "select.",
    "_ssl.",
    "grpc.",
    "zmq.",
    "_posixshm",
)
NEVER_WAIT = {
    "time.monotonic",
    "time.perf_counter",
    "time.time",
    "_queue.SimpleQueue.put",
    "_thread.get_ident",
    "posix.urandom",
    "posix.getpid",
    # The handover, the only lock of this kind; of `with lock` the profile sees only the end.
    "_thread.RLock.__exit__",
}


class Calls:
    """Counts, by name, the C functions that the agent's hooks call."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()

    def __call__(self, _frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call":
            self.seen[_name(function)] += 1

    def waits(self) -> set[str]:
        return {name for name in self.seen if name.startswith(WAITING)} - NEVER_WAIT


def _name(function: Any) -> str:
    owner = getattr(function, "__self__", None)
    if owner is None or isinstance(owner, ModuleType):
        return f"{function.__module__}.{function.__name__}"
    kind = owner if isinstance(owner, type) else type(owner)
    return f"{kind.__module__}.{kind.__name__}.{function.__name__}"


@pytest.fixture
def calls(scheduler: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    """Yield the calls made under the guard while a test runs, without those for log lines, which a change of state
    writes, and without garbage collections, which would end gRPC channels of earlier tests within a hook."""
    found, run = Calls(), scheduler._guard.run

    def profiled(hook: Any, *args: Any) -> Any:
        sys.setprofile(found)
        try:
            return run(hook, *args)
        finally:
            sys.setprofile(None)

    logger = logging.getLogger("vllm.meridian")
    monkeypatch.setattr(logger, "disabled", True)
    monkeypatch.setattr(scheduler._guard, "run", profiled)
    gc.disable()
    yield found
    gc.enable()
    sys.setprofile(None)


def serve(llm: Any, agent: Any, name: str) -> None:
    """Run thinking and answers, probes and caps, an abort, and more than the cache holds; then let the engine fall
    idle."""
    run = Run(llm)
    for i in range(6):
        run.add(f"{name}-{i}", opened(i), endless(agent, max_tokens=200))
    run.add(f"{name}-answer", {**cases()[0], "template": {"enable_thinking": False}}, endless(agent, max_tokens=60))
    run.until(lambda: len(run.tokens[f"{name}-0"]) > 20)
    run.abort(f"{name}-1")
    run.until()


@pytest.mark.parametrize("hung", [False, True], ids=["served", "the control plane hangs"])
def test_no_hook_waits(  # noqa: PLR0917
    llm: Any, agent: Any, scheduler: Any, control: Control, calls: Calls, hung: bool
) -> None:
    control.apply({**DENSE, "scheduler": {**DENSE["scheduler"], "max_think_tokens": 120}})
    if hung:
        control.process.signal(signal.SIGSTOP)
    try:
        serve(llm, agent, f"hung-{hung}")
    finally:
        control.process.signal(signal.SIGCONT)
    assert not scheduler._guard.fault
    assert calls.waits() == set()
    assert calls.seen["_queue.SimpleQueue.put"] > 0, "the link's thread was woken"
    assert calls.seen["time.perf_counter"] > 100
    control.settled()


def _with(lock: Any) -> None:
    with lock:
        pass


@pytest.mark.parametrize(
    "wait",
    [
        lambda: time.sleep(0),
        lambda: threading.Event().wait(0),
        lambda: _with(threading.Lock()),
        lambda: os.stat("/dev/null"),
    ],
    ids=["sleep", "event", "lock", "file"],
)
def test_a_hook_that_waits_is_seen(wait: Any) -> None:
    calls = Calls()
    sys.setprofile(calls)
    try:
        wait()
    finally:
        sys.setprofile(None)
    assert calls.waits()
