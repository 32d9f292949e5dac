"""Forks of the engine's process where GRPC_ENABLE_FORK_SUPPORT is set: gRPC then stops its own threads before each, and
the thread that forks, the engine's, waits for that.

Left alone it waits for up to a second: the thread that sends waits so long for its last message, which nobody delivers
any more, and the thread that receives looks up once a second. Owns what has both stop at once; the stream goes on.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import grpc

T = TypeVar("T")

# As gRPC reads it.
ENABLED = os.environ.get("GRPC_ENABLE_FORK_SUPPORT", "0").lower() in {"1", "true", "yes"}
# For the message that is being sent; and until the call that wakes the receiver is over.
SENT_S, NUDGE_S = 0.02, 0.002
# Any will do: it ends before it is answered.
NUDGE = "/grpc.health.v1.Health/Check"


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
