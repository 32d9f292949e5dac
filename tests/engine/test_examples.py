"""The scripts in deploy/examples, as they are: two processes at a time, each with an engine of its own. Nothing in them
or here names Meridian but the environment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.data import maze
from tests.engine.test_served import APART, TOGETHER
from tests.processes import ENGINE_ENV, MODEL, ROOT, Control, wait_for

if TYPE_CHECKING:
    from pathlib import Path

    from meridian.v1 import fleet_pb2

CAP = 12
# What VLLM_PLUGINS says for each, and whether engine core and worker are one process.
EXAMPLES = {"llm": ("meridian", APART), "async_llm": ("", TOGETHER)}
OPTIONS = ["--model", str(MODEL), "--served-model-name", "maze", "--reasoning-parser", "qwen3", "--enforce-eager"]
OPTIONS += ["--dtype", "float32", "--block-size", "32", "--max-model-len", "1024", "--max-num-seqs", "2"]


def start(name: str, control: Control, folder: Path) -> subprocess.Popen[str]:
    """VLLM_PLUGINS lists our plugin for one of the two, and is not set for the other."""
    plugins, processes = EXAMPLES[name]
    env = {**os.environ, **ENGINE_ENV, "MERIDIAN_CONTROL": control.target, "MERIDIAN_ENGINE_ID": name}
    env |= {**processes, "MERIDIAN_STATE_DIR": str(folder / name)}
    env.pop("VLLM_PLUGINS", None)
    if plugins:
        env["VLLM_PLUGINS"] = plugins
    command = [sys.executable, str(ROOT / "deploy" / "examples" / f"{name}.py"), *OPTIONS]
    with (folder / f"{name}.err").open("w") as errors:
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=errors, env=env, text=True, start_new_session=True
        )


@pytest.mark.timeout(400)
def test_scripts_are_governed_by_the_environment_alone(tmp_path: Path) -> None:
    """Each shows up in a real meridian-control, takes the policy, and its thinking ends at the cap."""
    control = Control(tmp_path)
    running: dict[str, subprocess.Popen[str]] = {}
    try:
        revision = control.set_policy({"scheduler": {"max_think_tokens": CAP, "min_think_tokens": 0}})
        running = {name: start(name, control, tmp_path) for name in EXAMPLES}

        def engines() -> dict[str, fleet_pb2.Engine]:
            for name, process in running.items():
                assert process.poll() is None, (tmp_path / f"{name}.err").read_text()[-3000:]
            return {engine.engine_id: engine for engine in control.engines()}

        def governed() -> bool:
            found = engines()
            return found.keys() == EXAMPLES.keys() and all(e.acked_revision == revision for e in found.values())

        wait_for(governed, 300, "both engines to take the policy")
        for process in running.values():
            assert process.stdin is not None
            process.stdin.write(maze.prompts(1, seed=11)[0] + "\n")
            process.stdin.flush()
        wait_for(lambda: all(sum(e.think_tokens.counts) for e in engines().values()), 60, "both requests to end")
        for engine in engines().values():
            assert (sum(engine.think_tokens.counts), engine.think_tokens.sum) == (1, CAP)
            assert engine.ends == {"hard_cap": 1}
            assert engine.entropy_backend == 1, "the CPU measures"
        for name, process in running.items():
            said, _ = process.communicate(timeout=60)
            assert process.returncode == 0, (tmp_path / f"{name}.err").read_text()[-3000:]
            assert " ".join(maze.ANSWER_WORDS[:2]) in said, said
    finally:
        for process in running.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        control.process.stop()
