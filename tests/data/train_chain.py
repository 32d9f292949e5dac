"""Train the chain model: its words, its first embeddings and its four stages. The task itself is in chain.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.data import chain, training

NUMBERS = tuple(str(number) for number in range(10, 82))


@dataclass(frozen=True)
class Stage(training.Stage):
    """A stage of training, which also says how often a first pass slips."""

    slips: float = 0.025


def embed(table: torch.Tensor, index: dict[str, int]) -> None:
    """Begin each step of the prompt as one vector for its letter plus one for its operation."""
    letters = torch.randn(len(chain.LABELS), table.shape[1]) * 0.14
    operations = torch.randn(len(chain.OPERATIONS), table.shape[1]) * 0.14
    table[index[f"{chain.LABELS[0]}:{chain.OPERATIONS[0]}"] :] = (letters[:, None] + operations[None]).flatten(0, 1)


RECIPE = training.Recipe(
    name="chain",
    words=(
        *("start", chain.CHECK, *chain.ANSWER_PREFIX, *chain.WORDS, *chain.CONNECTORS),
        *(*chain.DIGITS, *NUMBERS, *chain.LABELS, *chain.OPERATIONS),
        *(f"{label}:{operation}" for label in chain.LABELS for operation in chain.OPERATIONS),
    ),
    stages=(
        Stage(steps=400, rate=1.5e-3, repeats=1),
        Stage(steps=1000, rate=1e-3, repeats=8, cut=0.25, empty=0.04, context=0.04),
        Stage(steps=900, rate=8e-4, repeats=8, cut=0.3, empty=0.04, context=0.04, slips=0.015),
        Stage(
            steps=250, rate=5e-4, repeats=8, cut=0.5, empty=0.04, context=0.04, slips=0.015, noise=0.6, noise_words=20
        ),
    ),
    make=lambda rng, _: chain.make_chain(rng),
    thinking=lambda rng, task, stage: chain.thinking(rng, task, stage.repeats, stage.slips),
    answer=chain.answer_tokens,
    embed=embed,
)

if __name__ == "__main__":
    training.run(RECIPE, __doc__)
