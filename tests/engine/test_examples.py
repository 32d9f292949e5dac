"""The scripts in deploy/examples as they are: two processes at a time, each with an engine of its own.

Only the environment names Meridian, neither the scripts nor this test. `make test-examples` runs the test.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from meridian.v1 import fleet_pb2

from tests.data import maze
from tests.engine.served import APART, TOGETHER
from tests.processes import BUSY, ENGINE_ENV, MODEL, ROOT, Control, Process, wait_for

CAP = 12
# The value of VLLM_PLUGINS for each example, and whether engine core and worker are one process.
EXAMPLES = {"llm": ("meridian", APART), "async_llm": ("", TOGETHER)}
OPTIONS = ["--model", str(MODEL), "--served-model-name", "maze", "--reasoning-parser", "qwen3", "--enforce-eager"]
OPTIONS += ["--dtype", "float32", "--block-size", "32", "--max-model-len", "1024", "--max-num-seqs", "2"]


class Script(Process):
    """An example with an engine of its own; VLLM_PLUGINS lists the agent's plugin for one example and is unset for the
    other."""

    def __init__(self, name: str, control: Control, folder: Path) -> None:
        plugins, processes = EXAMPLES[name]
        env = {**ENGINE_ENV, **processes, "MERIDIAN_CONTROL": control.target, "MERIDIAN_ENGINE_ID": name}
        env["MERIDIAN_STATE_DIR"] = str(folder / name)
        if plugins:
            env["VLLM_PLUGINS"] = plugins
        questions = folder / f"{name}.questions"
        os.mkfifo(questions)
        # Opened for reading and writing, because otherwise this process would wait for the script, or the script for
        # it.
        self._questions = os.fdopen(os.open(questions, os.O_RDWR), "w")
        command = [sys.executable, str(ROOT / "deploy" / "examples" / f"{name}.py"), *OPTIONS]
        super().__init__(command, folder / f"{name}.log", env, str(questions))

    def ask(self, question: str) -> None:
        print(question, file=self._questions, flush=True)

    def finish(self) -> int:
        """Send no more questions, and return the exit status."""
        self._questions.close()
        return self.popen.wait(60 * BUSY)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_scripts_are_governed_by_the_environment_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each engine connects to a real meridian-control and takes the policy, and its thinking ends at the cap."""
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    control = Control(tmp_path)
    running: dict[str, Script] = {}
    try:
        revision = control.set_policy({"scheduler": {"max_think_tokens": CAP, "min_think_tokens": 0}})
        running = {name: Script(name, control, tmp_path) for name in EXAMPLES}

        def engines() -> dict[str, fleet_pb2.Engine]:
            for script in running.values():
                assert script.popen.poll() is None, script.output()[-3000:]
            return {engine.engine_id: engine for engine in control.engines()}

        def governed() -> bool:
            found = engines()
            return found.keys() == EXAMPLES.keys() and all(e.acked_revision == revision for e in found.values())

        wait_for(governed, 300, "both engines to take the policy")
        for script in running.values():
            script.ask(maze.prompts(1, seed=11)[0])
        wait_for(lambda: all(sum(e.think_tokens.counts) for e in engines().values()), 60, "both requests to end")
        for engine in engines().values():
            assert (sum(engine.think_tokens.counts), engine.think_tokens.sum) == (1, CAP)
            assert engine.ends == {"hard_cap": 1}
            assert engine.entropy_backend == 1, "the CPU measures"
        for script in running.values():
            assert script.finish() == 0, script.output()[-3000:]
            assert " ".join(maze.ANSWER_WORDS[:2]) in script.output()
    finally:
        for script in running.values():
            script.kill()
        control.process.stop()
