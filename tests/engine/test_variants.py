"""The same facts on engines built otherwise: asynchronous scheduling, several tokens a step, Model Runner V2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ENGINE_ENV, ROOT, Control

INTERPRETER = {
    "TRITON_INTERPRET": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent / "interpreter"), os.environ.get("PYTHONPATH", "")]),
}


@pytest.mark.parametrize(
    ("variant", "scheduler", "extra"),
    [("async", "AsyncScheduler", {}), ("ngram", "Scheduler", {}), ("v2", "Scheduler", INTERPRETER)],
    ids=["async", "ngram", "v2"],
)
def test_signals_and_ends_are_exact(tmp_path: Path, variant: str, scheduler: str, extra: dict[str, str]) -> None:
    """Signals equal the offline computation; caps to the token, one end marker, nothing changed before it, EAT too."""
    control = Control(tmp_path)
    try:
        command = [sys.executable, "-m", "tests.engine.variant", variant, control.target]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **ENGINE_ENV, **extra}, check=False
        )
    finally:
        control.process.stop()
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    end, free = found["end"], found["free"]
    assert scheduler in found["scheduler"]
    assert found["v2"] == (variant == "v2")
    assert not found["fault"]
    assert not found["mismatches"]
    assert not found["probe_mismatches"]
    # Where drafts are made, vLLM computes rows for them after a probe too.
    assert max(found["probe_costs"]) <= (2 if variant != "ngram" else 2 + 4)
    for cap, runs in found["capped"].items():
        for before, after in zip(free, runs, strict=True):
            natural = before.index(end) if end in before else len(before)
            assert after.index(end) == min(int(cap), natural)
            assert after.count(end) == 1
            assert after[: after.index(end)] == before[: after.index(end)]
    assert found["ends"]["eat"] > 0
    assert found.get("frozen", free) == free, "a freeze leaves stock vLLM, under a policy that ends thinking"
    for before, after in zip(free, found["converged"], strict=True):
        at = after.index(end) if end in after else len(after)
        assert after.count(end) <= 1
        assert after[:at] == before[:at]


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
