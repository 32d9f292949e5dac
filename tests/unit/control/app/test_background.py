"""What an unexpected error of a job beside the server does."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from meridian_control.app import background
from meridian_control.app.background import CALM_S, FIRST_PAUSE_S, LONGEST_PAUSE_S, Job, keep_running


class Failing:
    """A job that fails `times` times after `runs_s` seconds each, and then returns; its clock has no real time."""

    def __init__(self, times: int, runs_s: float = 0.0) -> None:
        self.left, self._runs_s, self.now_s = times, runs_s, 0.0
        self.pauses_s: list[float] = []

    async def run(self) -> None:
        self.now_s += self._runs_s
        if self.left:
            self.left -= 1
            raise KeyError("not expected")

    async def sleep(self, pause_s: float) -> None:
        self.pauses_s.append(pause_s)

    def kept(self, *, keeps_in_step: bool = False) -> Coroutine[Any, Any, None]:
        job = Job("the job", self.run, keeps_in_step)
        return keep_running(job, clock=lambda: self.now_s, sleep=self.sleep)


async def test_a_job_goes_on_after_an_unexpected_error(caplog: pytest.LogCaptureFixture) -> None:
    job = Failing(9)
    await job.kept()
    assert job.left == 0
    assert job.pauses_s[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert job.pauses_s[-1] == LONGEST_PAUSE_S
    first = caplog.records[0]
    assert first.getMessage() == "the job: an unexpected error; it goes on in 1 s"
    assert first.levelname == "ERROR"
    assert first.exc_info is not None


async def test_a_job_that_has_run_for_long_begins_with_the_first_pause() -> None:
    job = Failing(3, CALM_S)
    await job.kept()
    assert job.pauses_s == [FIRST_PAUSE_S] * 3


async def test_a_replica_that_falls_behind_ends() -> None:
    job = Failing(1)
    with pytest.raises(KeyError):
        await job.kept(keeps_in_step=True)
    assert job.pauses_s == []


async def test_a_cancelled_job_ends() -> None:
    began = asyncio.Event()

    async def run() -> None:
        began.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(background.keep_running(Job("the job", run)))
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
