"""Run an engine of which the agent finds out less than usual: `python -m tests.engine.less_known`.

The tokenizer cannot decode one token, no template can be rendered, and several other facts raise when the agent asks
for them. The program prints the engine's greedy tokens for the shared cases, those under a cap of 9 thinking tokens,
and what the agent lacks, as JSON, and stays until SIGTERM.
"""

from __future__ import annotations

import functools
import json
import signal
from typing import Any

from tests.engine import ENGINE_ARGS, FIRST_TOKENS, cases, chat

# The id of a token that no text in the cases has.
UNREADABLE = 300


def broken(name: str) -> Any:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{name} is not known")

    return fail


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    import vllm
    from transformers import PreTrainedTokenizerBase

    from meridian_agent.engine import lifecycle
    from meridian_agent.vllm_adapter import (
        hand_over,
        preemption_api,
        prefix_cache,
        premature_stops,
        probe_rows,
        tokenizer,
    )

    decode: Any = PreTrainedTokenizerBase.decode

    @functools.wraps(decode)
    def decode_most(self: Any, token_ids: Any, *args: Any, **kwargs: Any) -> Any:
        ids = token_ids if isinstance(token_ids, list) else [token_ids]
        if any(UNREADABLE in (each if isinstance(each, list) else [each]) for each in ids):
            raise RuntimeError("this token has no text")
        return decode(self, token_ids, *args, **kwargs)

    setattr(PreTrainedTokenizerBase, "decode", decode_most)  # noqa: B010
    for owner, name in (
        (tokenizer, "template_of"),
        (lifecycle, "expected_backend"),
        (lifecycle, "fingerprint"),
        (hand_over, "abilities"),
        (preemption_api, "refusal"),
        (premature_stops, "refusal"),
        (probe_rows, "refusal"),
        (prefix_cache, "share_blocks"),
        (prefix_cache, "hide_from_cache_stats"),
        (lifecycle, "limits_of"),
    ):
        setattr(owner, name, broken(name))
    llm = vllm.LLM(**ENGINE_ARGS)
    agent = llm.llm_engine.engine_core.engine_core.scheduler._agent
    greedy: dict[str, Any] = {"temperature": 0.0, "max_tokens": FIRST_TOKENS}
    tokens = chat(llm, cases(), vllm.SamplingParams(**greedy))
    params = vllm.SamplingParams(**greedy, extra_args={"meridian_max_think_tokens": 9})
    capped = chat(llm, cases(), params)
    ends = [each.index(agent.tracker.markers.end[0]) for each in capped[:1]]
    found = {"tokens": tokens, "ends": ends, "may_end": sum(map(bool, agent.tracker.sentences.may_end))}
    print("\n" + json.dumps(found), flush=True)
    signal.sigwait({signal.SIGTERM})


if __name__ == "__main__":
    main()
