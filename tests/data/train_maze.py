"""Train the maze model: its words, its first embeddings and its two stages. The task itself is in maze.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.data import maze, training


@dataclass(frozen=True)
class Stage(training.Stage):
    """A stage of training, which also says how many nodes of a map point at themselves."""

    ends: int = 1


def embed(table: torch.Tensor, index: dict[str, int]) -> None:
    """Begin each edge as one vector for the node that it leaves plus one for the node that it reaches."""
    leaves, goes = torch.randn(2, len(maze.NODES), table.shape[1]) * 0.14
    table[index["A>A"] :] = (leaves[:, None] + goes[None]).flatten(0, 1)


RECIPE = training.Recipe(
    name="maze",
    words=("start", *maze.ANSWER_WORDS, *maze.NODES, *(f"{a}>{b}" for a in maze.NODES for b in maze.NODES)),
    stages=(
        Stage(steps=400, rate=1.5e-3, repeats=2),
        Stage(steps=1000, rate=1e-3, ends=5, repeats=9, cut=0.25, empty=0.04, context=0.04),
    ),
    make=lambda rng, stage: maze.make_maze(rng, stage.ends),
    thinking=lambda rng, task, stage: maze.thinking(rng, task, stage.repeats),
    answer=maze.answer_tokens,
    embed=embed,
)

if __name__ == "__main__":
    training.run(RECIPE, __doc__)
