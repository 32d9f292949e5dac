"""Compute offline, with Transformers, which answers a request would have given if its thinking had been cut earlier.

The module owns the labels that calibration reads, and the oracle. A cut appends the end marker to the generated tokens
and, if the model's answers begin with a fixed phrase, that phrase; the label is the probability of the right answer
after it. The model would continue from exactly these tokens, so the label is the chance that its own answer is right.
The label assumes that the answer begins with the phrase; the measured accuracy of the arms does not depend on this
assumption.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.bench.driver import Completion, Sample
from tests.bench.tasks import Task
from tests.data import maze


@dataclass(frozen=True)
class Cuts:
    """All cuts of one request's thinking; entry n keeps n thinking tokens.

    chance: probability of the right answer. likeliest: whether the likeliest answer is right. sentence_ends: thinking
    tokens up to each sentence end.
    """

    chance: list[float]
    likeliest: list[bool]
    sentence_ends: list[int]


class Reference:
    """The task's model, loaded in Transformers."""

    def __init__(self, task: Task) -> None:
        from tests.data import measure

        self._subject = measure.Subject(measure.TASKS[task.name], task.model)
        self._stop: int = self._subject.tokenizer.convert_tokens_to_ids(maze.STOP)
        self._known: dict[tuple[str, tuple[int, ...]], Cuts] = {}

    def cuts(self, sample: Sample, completion: Completion) -> Cuts:
        key = sample.name, completion.tokens
        if key not in self._known:
            self._known[key] = self._cuts(sample, completion)
        return self._known[key]

    def _cuts(self, sample: Sample, completion: Completion) -> Cuts:
        trace = self._subject.trace(sample.prompt, self._subject.ids(sample.prompt), list(completion.tokens))
        ends = [at for at, token in enumerate(trace.thinking, 1) if token == self._stop]
        return Cuts(trace.chance, [guess == trace.truth for guess in trace.guess], ends)


def write_labels(path: Path, done: Sequence[tuple[Sample, Completion]], cuts: Sequence[Cuts]) -> None:
    """Write the labels for `meridianctl calibrate`; the natural answer is judged by its probability, as the cuts
    are."""
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
    """A request whose thinking the oracle ends. chance: probability of the right answer at that point."""

    think_tokens: int
    right: bool
    chance: float


def oracle(completion: Completion, cut: Cuts, anywhere: bool) -> Ideal:
    """Return the request with thinking ended at the first sentence end (or token) at which the likeliest answer is
    right.

    If there is no such place, the thinking stays as it is.
    """
    places = range(len(cut.likeliest)) if anywhere else cut.sentence_ends
    first = next((at for at in places if cut.likeliest[at]), None)
    if first is None:
        return Ideal(completion.think_tokens, completion.right, natural_chance(completion, cut))
    return Ideal(first, True, cut.chance[first])


def natural_chance(completion: Completion, cut: Cuts) -> float:
    """Return the probability of the right answer after all of the thinking, or 0 if the thinking does not end."""
    return cut.chance[-1] if completion.ended else 0.0
