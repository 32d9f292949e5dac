"""Order under vLLM's priority policy, on an engine of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.processes import ENGINE_ENV, ROOT, Control

if TYPE_CHECKING:
    from pathlib import Path


def test_answers_first_under_the_priority_policy(tmp_path: Path) -> None:
    """Stock preempts answers that came last; governed it does not, except for requests whose own priority is higher."""
    control = Control(tmp_path)
    try:
        command = [sys.executable, "-m", "tests.engine.priority", control.target]
        env = {**os.environ, **ENGINE_ENV}
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, check=False)
    finally:
        control.process.stop()
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["policy"], found["fault"]) == ("priority", "")
    assert found["stock"]["answer"] > 0
    assert (found["output_first"]["think"] > 0, found["output_first"]["answer"]) == (True, 0)
    assert found["thinking_goes_first"]["answer"] > 0, "a request's own priority comes before its phase"
    for arm in ("stock", "output_first", "thinking_goes_first"):
        assert {len(t) for n, t in found[arm]["tokens"].items() if n.startswith("answer")} == {250}
        assert found[arm]["tokens"] == found["stock"]["tokens"]
