"""Show progress while the demo runs: one live block on a terminal, otherwise one plain line every few seconds."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from rich.live import Live
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from rich.console import Console

LIVE_INTERVAL_S = 0.25
PLAIN_INTERVAL_S = 4.0


@contextlib.asynccontextmanager
async def shown(console: Console, line: Callable[[], str]) -> AsyncIterator[None]:
    """Show what `line` returns, repeatedly, while the block runs."""
    task = asyncio.create_task(_redraw(console, line) if console.is_terminal else _print(console, line))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _redraw(console: Console, line: Callable[[], str]) -> None:
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            live.update(Text(line()), refresh=True)
            await asyncio.sleep(LIVE_INTERVAL_S)


async def _print(console: Console, line: Callable[[], str]) -> None:
    while True:
        await asyncio.sleep(PLAIN_INTERVAL_S)
        console.out(line(), highlight=False)
