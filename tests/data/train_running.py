"""Train the running model from the weights of the chain model. The task itself is in running.py."""

from __future__ import annotations

from dataclasses import replace

from tests.data import running, train_chain, training
from tests.data.training import HERE, Recipe

# The stages before are those of the chain model, whose words and shape are the same.
STAGE = train_chain.Stage(steps=700, rate=6e-4, cut=0.5, empty=0.04, context=0.04)

RECIPE: Recipe[running.Chain, train_chain.Stage] = replace(
    train_chain.RECIPE,
    name="running",
    stages=(STAGE,),
    start=HERE / "chain-qwen3",
    thinking=lambda rng, task, _: running.thinking(rng, task),
    answer_after=running.answer_after,
    endless=running.loops,
)

if __name__ == "__main__":
    training.run(RECIPE, __doc__)
