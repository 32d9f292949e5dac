"""A control plane serves as many engines as `--max-engines` says, whatever the soft limit of open files is."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from tests.processes import Control


class Limited(Control):
    within = ("sh", "-c", 'ulimit -Sn 256 && exec "$@"', "sh")


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="only Linux tells a process's limits")
def test_the_soft_limit_is_raised_to_the_hard_one(tmp_path: Path) -> None:
    control = Limited(tmp_path)
    try:
        soft, hard = resource.prlimit(control.process.popen.pid, resource.RLIMIT_NOFILE)
    finally:
        control.process.stop()
    assert (soft, hard > 256) == (hard, True)
