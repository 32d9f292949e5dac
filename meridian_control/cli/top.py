"""Implements `meridianctl top`, which shows engines and live requests and updates them periodically.

The module uses the control plane only through its gRPC API. One thread waits for the key that ends the command, another
one for updates.
"""

import os
import queue
import select
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated

import grpc
import typer
from meridian.v1 import fleet_pb2
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from meridian_control.cli.console import INVALID, connect, console, fail, say
from meridian_control.cli.expected import NO_ENGINE
from meridian_control.cli.tables import engine_table, request_table

KEY_POLL_S = 0.1


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
        call = client.fleet.WatchFleet(request)
        if once:
            state = next(call)
            call.cancel()
            if state.engines:
                terminal.print(_view(state, terminal))
            else:
                say(NO_ENGINE)
            return
        try:
            with _until_q(call.cancel), Live(console=terminal, screen=screen, auto_refresh=False) as live:
                for state in _newest(call):
                    live.update(_view(state, terminal), refresh=True)
        except KeyboardInterrupt:
            pass
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.CANCELLED:
                raise
        finally:
            call.cancel()


def _newest(call: Iterable[fleet_pb2.WatchFleetResponse]) -> Iterator[fleet_pb2.WatchFleetResponse]:
    """Yield the updates of a call, without those that a newer one has followed while the caller drew another. Raises
    what the call raises."""
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
        newest = updates.get()
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
        view = Group(engine_table(state.engines), "", request_table(ordered[:room]), *more)
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
