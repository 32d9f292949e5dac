"""What cutting a request's thinking would have given, computed offline with Transformers on the generated tokens.

Owns the labels that calibration reads and the oracle. A cut appends the end marker and, where answers begin with words
that say nothing, those words; the label is the probability of the right answer after that. At a cut the model goes on
from exactly these tokens, so this is the chance that its own answer is right; that it begins with those words is taken
for granted, and the measured accuracy of the arms does not depend on it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.data import maze

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.bench.driver import Completion, Sample
    from tests.bench.tasks import Task


@dataclass(frozen=True)
class Cuts:
    """Every cut of one request's thinking: entry n keeps n thinking tokens. chance: of the right answer. likeliest:
    whether the likeliest answer is right. sentence_ends: thinking tokens up to each sentence end."""

    chance: list[float]
    likeliest: list[bool]
    sentence_ends: list[int]


class Reference:
    """The task's model in Transformers."""

    def __init__(self, task: Task) -> None:
        from tests.data import measure

        self._subject = measure.Subject(measure.TASKS[task.name], task.model)
        self._stop: int = self._subject.tokenizer.convert_tokens_to_ids(maze.STOP)

    def cuts(self, sample: Sample, completion: Completion) -> Cuts:
        trace = self._subject.trace(sample.prompt, self._subject.ids(sample.prompt), list(completion.tokens))
        ends = [at for at, token in enumerate(trace.thinking, 1) if token == self._stop]
        return Cuts(trace.chance, [guess == trace.truth for guess in trace.guess], ends)


def write_labels(path: Path, done: Sequence[tuple[Sample, Completion]], cuts: Sequence[Cuts]) -> None:
    """The labels of `meridianctl calibrate`. The natural answer is judged as the cuts are, by its probability."""
    with path.open("w") as file:
        for (sample, completion), cut in zip(done, cuts, strict=True):
            for row in _rows(completion, cut):
                file.write(json.dumps({"request_id": sample.name} | row) + "\n")


def _rows(completion: Completion, cut: Cuts) -> Iterator[dict[str, float]]:
    yield {"correct": round(min(1.0, natural_chance(completion, cut)), 6)}
    for tokens, chance in enumerate(cut.chance):
        yield {"think_tokens": tokens, "correct": round(min(1.0, chance), 6)}


@dataclass(frozen=True)
class Ideal:
    """A request as the oracle ends it. chance: of the right answer there."""

    think_tokens: int
    right: bool
    chance: float


def oracle(completion: Completion, cut: Cuts, anywhere: bool) -> Ideal:
    """Thinking that ends at the first sentence end (or token) where the likeliest answer is right; unchanged without
    one."""
    places = range(len(cut.likeliest)) if anywhere else cut.sentence_ends
    first = next((at for at in places if cut.likeliest[at]), None)
    if first is None:
        return Ideal(completion.think_tokens, completion.right, natural_chance(completion, cut))
    return Ideal(first, True, cut.chance[first])


def natural_chance(completion: Completion, cut: Cuts) -> float:
    """Of the right answer after all of the thinking; none where it does not end."""
    return cut.chance[-1] if completion.ended else 0.0
