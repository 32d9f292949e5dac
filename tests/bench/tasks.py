"""The three tasks of the benchmarks: a model, its prompts, the judge of its answers, and the samples of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tests.bench.driver import Sample
from tests.data import chain, maze, running
from tests.processes import ROOT

DATA = ROOT / "tests" / "data"
# Prompt seeds of the calibration set and of the first measured round; each further round adds 1.
CALIBRATION_SEED, FIRST_SEED = 7_000, 8_000
SAMPLING_SEEDS_PER_ROUND = 1_000_000


class TaskModule(Protocol):
    """Functions that the module of a task has."""

    def prompts(self, count: int, seed: int = 0) -> list[str]: ...

    def is_correct(self, prompt: str, text: str) -> bool: ...


@dataclass(frozen=True)
class Task:
    """A task. name: the name under which the model is served. answer_prefix: the fixed text with which its answers
    begin."""

    name: str
    model: Path
    module: TaskModule
    max_tokens: int
    answer_prefix: str = ""

    def samples(self, seed: int, count: int, round_number: int = 0) -> list[Sample]:
        """Return requests with the prompts and the sampling seeds of one seed."""
        return [
            Sample(f"{self.name}-{seed}-{index}", round_number, prompt, seed * SAMPLING_SEEDS_PER_ROUND + index)
            for index, prompt in enumerate(self.module.prompts(count, seed))
        ]

    def measured(self, seeds: int, count: int) -> list[Sample]:
        """Return the requests of all measured rounds."""
        return [s for number in range(seeds) for s in self.samples(FIRST_SEED + number, count, number)]

    def is_correct(self, prompt: str, text: str) -> bool:
        return self.module.is_correct(prompt, text)


MAZE = Task("maze", DATA / "maze-qwen3", maze, 700)
CHAIN = Task("chain", DATA / "chain-qwen3", chain, 700, " ".join(chain.ANSWER_PREFIX))
RUNNING = Task("running", DATA / "running-qwen3", running, 700, " ".join(running.ANSWER_PREFIX))
