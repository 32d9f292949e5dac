"""The examples with several engines, run as they are: `vllm serve` with data-parallel ranks, and Ray Serve.

Only `make test-examples` runs these tests. `tests/engine/test_examples.py` runs the examples with one engine.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from meridian.v1 import fleet_pb2

from tests.data import maze
from tests.engine.test_examples import OPTIONS
from tests.needed import RAY
from tests.processes import ENGINE_ENV, MODEL, ROOT, Control, Process, free_port, wait_for
from tests.vllm_command import write_metadata

pytestmark = pytest.mark.long
CAP = 12
EXAMPLES = ROOT / "deploy" / "examples"
# Questions that a test asks until each engine has answered one.
MOST_QUESTIONS = 50


@pytest.fixture
def control(tmp_path: Path) -> Iterator[Control]:
    running = Control(tmp_path)
    running.set_policy({"scheduler": {"max_think_tokens": CAP, "min_think_tokens": 0}})
    yield running
    running.process.stop()


def environment(control: Control, folder: Path) -> dict[str, str]:
    own = {"MERIDIAN_CONTROL": control.target, "MERIDIAN_STATE_DIR": str(folder / "state")}
    return {**ENGINE_ENV, **own, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def governed(control: Control, process: Process) -> dict[str, fleet_pb2.Engine]:
    """Return the two engines by name once both have taken the policy; none before that."""
    assert process.popen.poll() is None, process.output()[-3000:]
    found = {engine.engine_id: engine for engine in control.engines()}
    return found if len(found) == 2 and all(e.acked_revision == 2 for e in found.values()) else {}


def each_ends_at_the_cap(control: Control, process: Process, ask: Callable[[str], None]) -> None:
    """Ask until each engine has ended thinking at least once, and compare what the engines report with the cap."""
    wait_for(lambda: governed(control, process), 300, "both engines to take the policy")
    questions, asked = maze.prompts(MOST_QUESTIONS, seed=11), 0
    while not all(engine.ends for engine in control.engines()):
        ask(questions[asked])
        asked += 1

        def reported(number: int = asked) -> bool:
            return sum(sum(e.think_tokens.counts) for e in governed(control, process).values()) == number

        wait_for(reported, 60, "the request's end to be reported")
    for engine in control.engines():
        number = sum(engine.think_tokens.counts)
        assert engine.ends == {"hard_cap": number}
        assert engine.think_tokens.sum == number * CAP
        assert not engine.fault


def test_each_rank_of_vllm_serve_is_governed(control: Control, tmp_path: Path) -> None:
    """The ranks are named after the pod, and each ends thinking at the cap."""
    write_metadata(tmp_path / "named")
    env = environment(control, tmp_path) | {"MERIDIAN_ENGINE_ID": "pod-7", "PYTHONPATH": str(tmp_path / "named")}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    port = free_port()
    options = [*OPTIONS[2:], "--host", "127.0.0.1", "--port", str(port)]
    options += ["--distributed-executor-backend", "uni", "--num-gpu-blocks-override", "64"]
    command = ["sh", str(EXAMPLES / "data_parallel.sh"), str(MODEL), *options]
    process = Process(command, tmp_path / "served.log", env)

    def ask(question: str) -> None:
        body = {"model": "maze", "messages": [{"role": "user", "content": question}], "temperature": 0}
        httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=600).raise_for_status()

    def serving() -> bool:
        assert process.popen.poll() is None, process.output()[-3000:]
        try:
            return httpx.get(f"http://127.0.0.1:{port}/health", timeout=10).is_success
        except httpx.HTTPError:
            return False

    try:
        wait_for(serving, 300, "vLLM to serve")
        each_ends_at_the_cap(control, process, ask)
        assert {engine.engine_id for engine in control.engines()} == {"pod-7", "pod-7-dp1"}
    finally:
        process.stop()


@RAY.mark
def test_each_replica_of_ray_serve_is_governed(control: Control, tmp_path: Path) -> None:
    """The replicas have names of their own, and each ends thinking at the cap."""
    # Ray's sockets need a short path.
    ray = tempfile.mkdtemp(prefix="ray-")
    env = environment(control, tmp_path) | {"RAY_TMPDIR": ray, "RAY_USAGE_STATS_ENABLED": "0"}
    asked = tmp_path / "questions"
    os.mkfifo(asked)
    with os.fdopen(os.open(asked, os.O_RDWR), "w") as questions:
        command = [sys.executable, str(EXAMPLES / "ray_serve.py"), "--gpus", "0", *OPTIONS]
        process = Process(command, tmp_path / "ray.log", env, str(asked))
        try:
            each_ends_at_the_cap(control, process, lambda question: print(question, file=questions, flush=True))
            questions.close()
            assert process.popen.wait(600) == 0, process.output()[-3000:]
            assert " ".join(maze.ANSWER_WORDS[:2]) in process.output()
        finally:
            process.stop()
            shutil.rmtree(ray, ignore_errors=True)
    assert all(engine.engine_id.startswith("ray-") for engine in control.engines())
