"""The same clients with stock vLLM, no agent and no faults: what its processes keep by themselves, and what the clients
complain of all the same."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from tests.soak.load import Load

if TYPE_CHECKING:
    from pathlib import Path


async def run(out: Path, seed: int, seconds: float, clients: int) -> dict[str, Any]:
    """Returns the summary: a soak's, as far as it concerns stock vLLM; growth is no violation."""
    load = Load(out, seed)
    try:
        # Nothing is ever decided.
        await load.begin(lambda: 0)
        watching, asking = asyncio.create_task(load.watch()), asyncio.create_task(load.clients.run(clients))
        await asyncio.wait({watching, asking}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        load.clients.stop()
        await asking
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        await load.count_steps()
    finally:
        load.stop()
    tally, (kept, _) = load.clients.tally, load.kept(seconds)
    return {
        "seconds": round(load.samples[-1].at_s, 1),
        "requests": tally.requests,
        "failed": len(tally.failed),
        "violations": len(tally.complaints),
        "seed": seed,
        "tokens": tally.tokens,
        "equal_to_stock": {"compared": tally.compared, "untouched": tally.untouched},
        **kept,
    }
