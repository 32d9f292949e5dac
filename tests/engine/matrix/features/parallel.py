"""Several workers: every rank gets the same instructions and samples the same tokens."""

from __future__ import annotations

from typing import Any

from tests.engine.matrix import feature
from tests.engine.matrix.asks import Ask
from tests.engine.matrix.engine import Engine
from tests.engine.matrix.features.signals import RANKS


@feature("every rank masks and samples the same", *RANKS)
def same_on_every_rank(engine: Engine) -> None:
    asks = [Ask(engine.prompt(i), {"temperature": 0.0, "max_tokens": 40}) for i in range(6)]
    free = engine.tokens(asks)
    engine.llm.collective_rpc(watch)
    engine.control.apply({"scheduler": {"max_think_tokens": 20}})
    for before, after in zip(free, engine.tokens(asks), strict=True):
        engine.check_ends_once(before, after, 20)
    first, *others = engine.llm.collective_rpc(watched)
    assert len(others) == engine.build.args["tensor_parallel_size"] - 1
    assert all(seen == first for seen in others)
    masks = [mask for mask, _ in first if mask]
    assert sum(len(ids) for ids, _ in masks) == len(asks)
    assert all(sampled for _, sampled in first)


def watch(worker: Any) -> None:
    """Make a worker record the masks that it is given and the tokens that it samples."""
    runner, seen = worker.model_runner, []
    sample_tokens = runner.sample_tokens

    def watching(grammar_output: Any) -> Any:
        output = sample_tokens(grammar_output)
        told = grammar_output and (
            grammar_output.structured_output_request_ids,
            grammar_output.grammar_bitmask.tolist(),
        )
        seen.append((told, [list(map(int, tokens)) for tokens in output.sampled_token_ids]))
        return output

    runner.sample_tokens, worker.meridian_seen = watching, (seen, sample_tokens)


def watched(worker: Any) -> list[Any]:
    """Return a worker's records and stop recording."""
    seen, worker.model_runner.sample_tokens = worker.meridian_seen
    found: list[Any] = seen
    return found
