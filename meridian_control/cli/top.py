"""Implements `meridianctl top`, which shows engines and live requests and updates them periodically.

The module uses the control plane only through its gRPC API. One thread waits for the key that ends the command, another
one for updates.
"""

import os
import queue
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import grpc
import typer
from meridian.v1 import fleet_pb2
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from meridian_control.cli.console import (
    INVALID,
    RECONNECT_S,
    RETRY_S,
    Client,
    connect,
    console,
    ended_by_signals,
    fail,
    say,
)
from meridian_control.cli.expected import NO_ENGINE
from meridian_control.cli.tables import cause_lines, engine_table, request_table

KEY_POLL_S = 0.1
# Seconds without an update after which the shown fleet counts as the one before.
SILENCE_S = 10.0
# Stands for an update that has not come.
NONE_CAME = fleet_pb2.WatchFleetResponse()
BROKEN = "The connection has ended or is silent, and is made again; this was the fleet before:"


def top(
    context: typer.Context,
    interval_ms: Annotated[int, typer.Option(min=1, max=2**31 - 1, help="Milliseconds between two updates.")] = 1000,
    once: Annotated[bool, typer.Option("--once", help="Print the first update and return.")] = False,
) -> None:
    """Show engines and live requests, most thinking tokens first, until q or Ctrl-C."""
    request, terminal = fleet_pb2.WatchFleetRequest(interval_ms=interval_ms), console()
    screen = terminal.is_terminal and sys.stdout.isatty()
    if not (screen or once):
        fail(INVALID, "top needs a terminal; --once prints the fleet as it is now")
    with connect(context) as client:
        watch = _Watch(client, request)
        if once:
            state = next(iter(watch))
            watch.stop()
            if state.engines:
                terminal.print(_view(state, terminal))
            else:
                say(NO_ENGINE)
            return
        try:
            with (
                ended_by_signals(signal.default_int_handler),
                _until_q(watch.stop),
                Live(console=terminal, screen=screen, auto_refresh=False) as live,
            ):
                view = Group()
                for state in _newest(watch, max(SILENCE_S, 3 * interval_ms / 1000)):
                    view = _view(state, terminal) if state is not NONE_CAME else view
                    live.update(Group(BROKEN, view) if state is NONE_CAME else view, refresh=True)
        except KeyboardInterrupt:
            pass
        finally:
            watch.stop()


class _Watch:
    """Yields the updates of the fleet until it is stopped. When a stream ends, NONE_CAME is yielded, and another stream
    is begun, for RECONNECT_S if the control plane cannot be reached. Raises grpc.RpcError."""

    def __init__(self, client: Client, request: fleet_pb2.WatchFleetRequest) -> None:
        self._client, self._request = client, request
        self._stopped = False
        self._call: Any = None

    def __iter__(self) -> Iterator[fleet_pb2.WatchFleetResponse]:
        retry_until = 0.0
        while not self._stopped:
            self._call = self._client.fleet.WatchFleet(self._request)
            if self._stopped:
                self._call.cancel()
            try:
                for update in self._call:
                    retry_until = time.monotonic() + RECONNECT_S
                    yield update
            except grpc.RpcError as error:
                if self._stopped:
                    return
                if error.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() >= retry_until:
                    raise
            if retry_until:
                yield NONE_CAME
            time.sleep(RETRY_S)

    def stop(self) -> None:
        self._stopped = True
        if self._call is not None:
            self._call.cancel()


def _newest(call: Iterable[fleet_pb2.WatchFleetResponse], silence_s: float) -> Iterator[fleet_pb2.WatchFleetResponse]:
    """Yield the updates of a call, without those that a newer one has followed while the caller drew another, and
    NONE_CAME each time that none comes for `silence_s`. Raises what the call raises."""
    updates: queue.SimpleQueue[fleet_pb2.WatchFleetResponse | Exception | None] = queue.SimpleQueue()

    def read() -> None:
        try:
            for update in call:
                updates.put(update)
            updates.put(None)
        except Exception as error:
            updates.put(error)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            newest = updates.get(timeout=silence_s)
        except queue.Empty:
            newest = NONE_CAME
        while not updates.empty():
            newest = updates.get()
        if newest is None:
            return
        if isinstance(newest, Exception):
            raise newest
        yield newest


def _view(state: fleet_pb2.WatchFleetResponse, terminal: Console) -> Group:
    """Return the engines and as many requests as the terminal has lines for, at least one."""
    ordered = sorted(state.requests, key=lambda r: (-r.think_tokens, r.engine_id, r.request_id))
    room = min(len(ordered), terminal.height) if terminal.is_terminal else len(ordered)
    while True:
        hidden = len(ordered) - room + state.requests_left_out
        more = [Text(f"and {hidden} more requests")] if hidden else []
        causes = map(Text, cause_lines(state.engines))
        view = Group(engine_table(state.engines), *causes, "", request_table(ordered[:room]), *more)
        # In a narrow terminal headings and rows take several lines.
        excess = len(terminal.render_lines(view)) - terminal.height
        if not terminal.is_terminal or excess <= 0 or room <= 1:
            return view
        room = max(1, room - max(1, excess // 3))


@contextmanager
def _until_q(leave: Callable[[], object]) -> Iterator[None]:
    """Call `leave` when the user types q, and restore the terminal's settings afterwards."""
    if not sys.stdin.isatty():
        yield
        return
    import termios
    import tty

    keyboard, stopped = sys.stdin.fileno(), threading.Event()
    before = termios.tcgetattr(keyboard)

    def listen() -> None:
        while not stopped.is_set():
            if select.select([keyboard], [], [], KEY_POLL_S)[0] and os.read(keyboard, 1) in (b"q", b"Q", b""):
                leave()
                return

    listener = threading.Thread(target=listen, daemon=True)
    try:
        tty.setcbreak(keyboard)
        listener.start()
        yield
    finally:
        stopped.set()
        listener.join()
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
