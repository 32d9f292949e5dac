"""Measure what the worker saves on a CPU where rules read signals at sentence ends only: `python -m
tests.bench.cost_ends`.

The protocol is in tests/bench/cost.md. Under both policies no token changes.
"""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Any

from tests.bench import harness, random_model
from tests.bench.cost_steps import NEUTRAL, Steps
from tests.bench.harness import BenchError, Column
from tests.engine.policies import SENTENCE_ENDS

if TYPE_CHECKING:
    import argparse

    from tests.bench.harness import Figures, Session

VOCABULARY, SHARE = 151_936, 1 / 16
SIZES, TOKENS = (16, 64), 100
POLICIES = {"all tokens": NEUTRAL, "sentence ends": SENTENCE_ENDS}


class Windows(Steps):
    """The engine, its control plane, and windows under both policies. bias: logit bias of the full stop."""

    bias: float | None = None

    def window(self, requests: int, arm: str) -> tuple[list[list[int]], Figures]:
        """Return the tokens of one batch of requests, which are the same in each window, and the worker's time."""
        self._control.apply(POLICIES[arm])
        params = [self._params(TOKENS, seed=number) for number in range(requests)]
        for each in params:
            # Most ids of the random model are no token of its tokenizer.
            each.detokenize = False
            if self.bias is not None:
                each.logit_bias[self._llm.get_tokenizer().convert_tokens_to_ids(".")] = self.bias
        (_, before_s), first = self._worker(), self._scheduler.current_step
        outputs = self._llm.generate(self._prompts(requests), params, use_tqdm=False)
        steps = self._scheduler.current_step - first
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        may_end = self._agent.tracker.sentences.may_end
        share = statistics.mean(token < len(may_end) and may_end[token] > 0 for of in tokens for token in of)
        return tokens, {"us": (self._worker()[1] - before_s) / steps * 1e6, "share": share}


async def measure(session: Session) -> dict[str, Any]:
    for name in ("maze", "random"):
        model = {"model": str(random_model.make(session.folder / "model", VOCABULARY))} if name == "random" else {}
        engine = Windows(session.fresh(), 10.0, {**model, "max_num_seqs": max(SIZES)})
        # The logits of nearly all tokens are 0.
        engine.bias = math.log(SHARE / (1 - SHARE) * VOCABULARY) if model else None
        try:
            for requests in SIZES:
                expected, _ = engine.window(requests, "all tokens")
                engine.window(requests, "sentence ends")

                def run(
                    arm: str, _: int, requests: int = requests, expected: Any = expected, engine: Windows = engine
                ) -> Figures:
                    tokens, figures = engine.window(requests, arm)
                    if tokens != expected:
                        raise BenchError("the policies have changed tokens")
                    return figures

                await session.rounds(list(POLICIES), run, session.options.pairs, case=f"{name} {requests}")
        finally:
            engine.close()
    runs, (every, ends) = session.runs, POLICIES
    columns = (Column("us", "observer, us per step", 1, "ratio"), Column("share", "tokens that may end a sentence", 3))
    session.table("Signals at sentence ends", "Steps of 10 ms or more, by model and requests.", columns, every)
    return {
        case: {
            "all_us": runs.median(every, "us", case).value,
            "only_us": runs.median(ends, "us", case).value,
            "ratio": runs.ratio(ends, every, "us", case).value,
            "share": runs.median(ends, "share", case).value,
        }
        for case in runs.cases()
    }


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pairs", type=int, default=2)


if __name__ == "__main__":
    harness.main("cost_ends", "The worker and sentence ends", __doc__, options, measure)
