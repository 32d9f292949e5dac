"""A logits processor that gives random weights the thinking of a model: sentences, paragraphs and an end by itself.
Runs in the engine's worker process, through vLLM's own `--logits-processors`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from tests.bench.streamed import END_ID, THINK_TOKENS

# Tokens of the maze's tokenizer, and how many thinking tokens lie between two of them.
SENTENCE_END, PARAGRAPH_END = 8, 7
SENTENCE_TOKENS, PARAGRAPH_TOKENS = 24, 96


class Thinking(AdapterLogitsProcessor):  # type: ignore[misc]
    """Makes the token that ends a sentence, a paragraph or the thinking the likeliest one where it is due."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Callable[[list[int], torch.Tensor], torch.Tensor] | None:
        think_tokens: int | None = (params.extra_args or {}).get(THINK_TOKENS)
        if think_tokens is None:
            return None

        def write(output: list[int], logits: torch.Tensor) -> torch.Tensor:
            if (token := due(len(output), think_tokens)) is not None:
                logits[token] = torch.finfo(logits.dtype).max
            return logits

        return write


def due(generated: int, think_tokens: int) -> int | None:
    """Return the token that follows `generated` tokens of a request that thinks for `think_tokens`; None for any."""
    if generated >= think_tokens:
        return END_ID if generated == think_tokens else None
    if (generated + 1) % SENTENCE_TOKENS:
        return None
    return SENTENCE_END if (generated + 1) % PARAGRAPH_TOKENS else PARAGRAPH_END
