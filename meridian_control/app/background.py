"""Runs the jobs beside the server so that an unexpected error of one job does not end all engines' streams.

Each job does its work in rounds that read anew what they need, so a job that is started again has lost nothing but
time. Such a job is restarted after a pause, with the traceback in the log. Jobs that keep a replica in step with other
replicas are the exception: without them a replica would show operators what is no longer in force, so their errors end
the process, and its engines go to a replica that works.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

logger = logging.getLogger("meridian_control")

# Seconds before a job is started again: at first, and at most. A job that has run for CALM_S begins with the first.
FIRST_PAUSE_S, LONGEST_PAUSE_S, CALM_S = 1.0, 60.0, 300.0


class Job(NamedTuple):
    """A job beside the server. name: what the job does, for the log. run: runs the job until it is cancelled, or
    returns if there is nothing to do. keeps_in_step: without the job this replica would fall behind the others."""

    name: str
    run: Callable[[], Coroutine[Any, Any, None]]
    keeps_in_step: bool = False


async def keep_running(
    job: Job,
    *,
    clock: Callable[[], float] | None = None,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Run a job, and run it again after an unexpected error, which is logged. Raises the error of a job that keeps this
    replica in step."""
    clock = clock or asyncio.get_running_loop().time
    pause_s = FIRST_PAUSE_S
    while True:
        began_s = clock()
        try:
            await job.run()
            return
        except Exception:
            if job.keeps_in_step:
                logger.critical("%s: an unexpected error ends this replica", job.name)
                raise
            if clock() - began_s >= CALM_S:
                pause_s = FIRST_PAUSE_S
            logger.exception("%s: an unexpected error; it goes on in %g s", job.name, pause_s)
        await sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
