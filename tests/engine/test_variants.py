"""The same facts on engines that yield tokens otherwise: asynchronous scheduling, and several tokens a step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.processes import ENGINE_ENV, ROOT, Control

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(("variant", "scheduler"), [("async", "AsyncScheduler"), ("ngram", "Scheduler")])
def test_ends_are_exact(tmp_path: Path, variant: str, scheduler: str) -> None:
    """Caps to the token, one end marker, nothing changed before it; the entropy rule ends thinking too."""
    control = Control(tmp_path)
    try:
        command = [sys.executable, "-m", "tests.engine.variant", variant, control.target]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **ENGINE_ENV}, check=False
        )
    finally:
        control.process.stop()
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    end, free = found["end"], found["free"]
    assert scheduler in found["scheduler"]
    assert not found["fault"]
    for cap, runs in found["capped"].items():
        for before, after in zip(free, runs, strict=True):
            natural = before.index(end) if end in before else len(before)
            assert after.index(end) == min(int(cap), natural)
            assert after.count(end) == 1
            assert after[: after.index(end)] == before[: after.index(end)]
    assert found["ends"]["eat"] > 0
    for before, after in zip(free, found["converged"], strict=True):
        at = after.index(end)
        assert after.count(end) == 1
        assert after[:at] == before[:at]
