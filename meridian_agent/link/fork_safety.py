"""Keeps forks of the engine's process short and safe: gRPC stops its own threads around each fork, and the forking
thread waits for them.

gRPC's core stops its threads by default, gRPC's Python part does so if GRPC_ENABLE_FORK_SUPPORT is set. The module
keeps the wait short, and prevents an endless wait in the engine and in a child process; the stream continues over a
fork.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

from meridian_agent.link.credentials import AgentCredentials

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import grpc

T = TypeVar("T")

# Seconds to wait for the message that is being sent, and seconds that the call which wakes gRPC's receiving thread may
# last.
SENT_S, NUDGE_S = 0.02, 0.002
# gRPC method of the call that wakes the receiving thread; any method serves, because the call ends before a server
# answers.
NUDGE = "/grpc.health.v1.Health/Check"


def _of_grpc(name: str) -> Callable[..., Any]:
    """Return a private function of gRPC, or one that does nothing if this version of gRPC has none of that name."""
    function: Callable[..., Any] = getattr(importlib.import_module("grpc._cython.cygrpc"), name, lambda *_: None)
    return function


# Whether gRPC's Python part stops its threads around a fork.
ENABLED = bool(_of_grpc("is_fork_support_enabled")())


@functools.cache
def _keep_core() -> grpc.Channel:
    """Return a channel that connects to nothing and lives as long as the process, because gRPC's core shuts down with
    its last channel.

    The core shuts down on a separate thread, which also ends the core's timer thread. After a fork during the shutdown
    the core has a timer thread that it does not know of, and the next fork would wait for that thread for ever while it
    holds the interpreter's lock.
    """
    return AgentCredentials().open("localhost", ())


class Forks:
    """The fork handlers of one link. The link's thread and gRPC's call `opened` and `held`; all other methods run on
    the thread that forks."""

    def __init__(self) -> None:
        self._channel: grpc.Channel | None = None
        self._may_send, self._in_hand = threading.Event(), threading.Event()
        self._may_send.set()
        self._in_hand.set()
        self._registered = False

    def opened(self, channel: grpc.Channel) -> None:
        """Note the channel of the new stream. Fork handlers that are registered after gRPC's own handlers run before
        them."""
        self._channel = channel
        _keep_core()
        # In a child process gRPC ends the calls of all channels that it knows, and takes locks that the link's thread
        # may have held at the fork; the child would wait for ever, as would every process that waits for the child.
        _of_grpc("fork_unregister_channel")(channel)
        if ENABLED and not self._registered:
            # Python cannot unregister a fork handler, so the handler must not keep the link alive.
            self._registered, before, after = True, weakref.WeakMethod(self._before), weakref.WeakMethod(self._after)
            os.register_at_fork(before=lambda: _call(before), after_in_parent=lambda: _call(after))

    def held(self, messages: Iterator[T]) -> Iterator[T]:
        """Return the same messages, but hand none of them to gRPC during a fork."""
        return self._held(messages) if ENABLED else messages

    def _held(self, messages: Iterator[T]) -> Iterator[T]:
        for message in messages:
            self._may_send.wait()
            self._in_hand.clear()
            yield message
            # gRPC asks for the next message once it has sent this one.
            self._in_hand.set()

    def _before(self) -> None:
        self._may_send.clear()
        self._in_hand.wait(SENT_S)
        # The channel may be closed, or just being closed.
        with contextlib.suppress(Exception):
            if self._channel is not None:
                call: Any = self._channel.unary_unary(NUDGE)
                call.future(b"", timeout=NUDGE_S)

    def _after(self) -> None:
        self._may_send.set()


def _call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    if (bound := method()) is not None:
        bound()
