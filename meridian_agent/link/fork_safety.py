"""Forks of the engine's process, around each of which gRPC stops its own threads while the thread that forks waits.

gRPC's core does so by default, its Python part where GRPC_ENABLE_FORK_SUPPORT is set. Owns what keeps such waits short,
and what has neither the engine nor a child wait for ever; the stream goes on.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")

# For the message that is being sent; and until the call that wakes the receiver is over.
SENT_S, NUDGE_S = 0.02, 0.002
# Any will do: it ends before it is answered.
NUDGE = "/grpc.health.v1.Health/Check"


def _of_grpc(name: str) -> Callable[..., Any]:
    """A function of gRPC's own; one that does nothing where this gRPC has no such."""
    found: Callable[..., Any] = getattr(importlib.import_module("grpc._cython.cygrpc"), name, lambda *_: None)
    return found


# Whether gRPC's Python part has its threads stop.
ENABLED = bool(_of_grpc("is_fork_support_enabled")())


@functools.cache
def _keep_core() -> grpc.Channel:
    """A channel that connects to nothing, as long as the process: gRPC's core ends with the last one.

    A thread of its own ends the core then, and its timer's thread. Of a fork meanwhile the core is left with a timer's
    thread that it does not know, for which the next fork waits for ever, with the interpreter's lock.
    """
    return grpc.insecure_channel("localhost")


class Forks:
    """One link's. `opened` and `held` are for its thread and gRPC's, all else happens on the thread that forks."""

    def __init__(self) -> None:
        self._channel: grpc.Channel | None = None
        self._may_send, self._in_hand = threading.Event(), threading.Event()
        self._may_send.set()
        self._in_hand.set()
        self._registered = False

    def opened(self, channel: grpc.Channel) -> None:
        """The stream is on this channel now. What is registered after gRPC's own handlers runs before them."""
        self._channel = channel
        _keep_core()
        # In a child gRPC ends the calls of all channels that it knows, and takes locks for that which the link's thread
        # may have had at the fork: the child would wait for ever, and whoever waits for it.
        _of_grpc("fork_unregister_channel")(channel)
        if ENABLED and not self._registered:
            # There is no way to take a handler back: it must not keep the link.
            self._registered, before, after = True, weakref.WeakMethod(self._before), weakref.WeakMethod(self._after)
            os.register_at_fork(before=lambda: _call(before), after_in_parent=lambda: _call(after))

    def held(self, messages: Iterator[T]) -> Iterator[T]:
        """The messages, none of which goes out while a fork is under way."""
        return self._held(messages) if ENABLED else messages

    def _held(self, messages: Iterator[T]) -> Iterator[T]:
        for message in messages:
            self._may_send.wait()
            self._in_hand.clear()
            yield message
            # gRPC has sent it and asks for the next one.
            self._in_hand.set()

    def _before(self) -> None:
        self._may_send.clear()
        self._in_hand.wait(SENT_S)
        # It may be closed, or about to be.
        with contextlib.suppress(Exception):
            if self._channel is not None:
                call: Any = self._channel.unary_unary(NUDGE)
                call.future(b"", timeout=NUDGE_S)

    def _after(self) -> None:
        self._may_send.set()


def _call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    if (found := method()) is not None:
        found()
