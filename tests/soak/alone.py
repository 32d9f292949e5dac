"""Run the same clients with stock vLLM, without an agent and without faults.

The run shows what stock vLLM's processes keep by themselves, and which complaints clients have without an agent.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from tests.soak.load import Load

if TYPE_CHECKING:
    from pathlib import Path


async def run(out: Path, seed: int, seconds: float, clients: int) -> dict[str, Any]:
    """Run the clients and return the parts of a soak's summary that concern stock vLLM; growth is no violation here."""
    load = Load(out, seed)
    try:
        # Stock vLLM has no decisions, so every request is untouched.
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
