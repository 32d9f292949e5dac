"""Measure what the worker saves on a CPU where rules read signals at sentence ends only.

`python -m tests.bench.cost_ends`. Protocol: two policies under which no token changes take turns in one engine, the
first of each pair alternating, after one window each to warm up. Under one policy all thinking tokens are measured,
under the other those that follow a sentence end. A window is one batch of requests with tokens drawn at random, the
same tokens in each window. The figure is the processor time of the observer's calls per step, as in `cost_worker`. The
engines are the maze model's, and one with random weights and a real vocabulary, in which one token in sixteen ends a
sentence. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from pathlib import Path
from typing import Any

from tests.bench import program, random_model
from tests.bench.cost_steps import NEUTRAL, Steps
from tests.engine.policies import SENTENCE_ENDS

VOCABULARY, SHARE = 151_936, 1 / 16
SIZES, PAIRS, TOKENS = (16, 64), 2, 100


class Windows(Steps):
    """The engine, its control plane, and windows under both policies."""

    def compare(self, requests: int, pairs: int, bias: float | None) -> dict[str, float]:
        """Return medians over pairs of windows: microseconds per step in the worker under both policies, and their
        ratio; and the share of tokens that may end a sentence. bias: logit bias of the full stop, None for none. Raises
        BenchError."""
        us: dict[bool, list[float]] = {False: [], True: []}
        share = 0.0
        for pair in range(pairs + 1):
            tokens = {}
            for only in (False, True) if pair % 2 else (True, False):
                self._control.apply(SENTENCE_ENDS if only else NEUTRAL)
                tokens[only], took_us = self._window(requests, bias)
                us[only].append(took_us)
            if tokens[False] != tokens[True]:
                raise program.BenchError("the policies have changed tokens")
            may_end = self._agent.tracker.sentences.may_end
            ends = [token < len(may_end) and may_end[token] > 0 for of in tokens[True] for token in of]
            share = statistics.mean(ends)
        full, only_ends = us[False][1:], us[True][1:]
        return {
            "all_us": statistics.median(full),
            "only_us": statistics.median(only_ends),
            "ratio": statistics.median(b / a for a, b in zip(full, only_ends, strict=True)),
            "share": share,
        }

    def _window(self, requests: int, bias: float | None) -> tuple[list[list[int]], float]:
        params = [self._params(TOKENS, seed=number) for number in range(requests)]
        for each in params:
            # Most ids of the random model are no token of its tokenizer.
            each.detokenize = False
            if bias is not None:
                each.logit_bias[self._llm.get_tokenizer().convert_tokens_to_ids(".")] = bias
        _, before_s = self._worker()
        first = self._scheduler.current_step
        outputs = self._llm.generate(self._prompts(requests), params, use_tqdm=False)
        steps = self._scheduler.current_step - first
        return [list(o.outputs[0].token_ids) for o in outputs], (self._worker()[1] - before_s) / steps * 1e6


def run() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    pairs = parser.parse_args().pairs
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("maze", "random"):
            model, bias = {}, None
            if name == "random":
                # The logits of nearly all tokens are 0.
                bias = math.log(SHARE / (1 - SHARE) * VOCABULARY)
                model = {"model": str(random_model.make(Path(folder) / "model", VOCABULARY))}
            there = Path(folder) / name
            there.mkdir()
            engine = Windows(there, 10.0, {**model, "max_num_seqs": max(SIZES)})
            try:
                for requests in SIZES:
                    found[f"{name} {requests}"] = engine.compare(requests, pairs, bias)
                    print(name, requests, found[f"{name} {requests}"], flush=True)
            finally:
                engine.close()
    print(json.dumps(found))


if __name__ == "__main__":
    program.main(run)
