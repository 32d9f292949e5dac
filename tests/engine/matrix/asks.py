"""Requests as plain values, run on an engine and returned as plain values.

So a stock engine in another process can be sent the same requests.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.engine import Run


@dataclass(frozen=True)
class Ask:
    """One request. params: fields of SamplingParams. lora: folder of an adapter."""

    prompt: list[int]
    params: dict[str, Any] = field(default_factory=dict)
    lora: str = ""
    priority: int = 0

    def sampling(self) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        fields = copy.deepcopy(self.params)
        if "structured_outputs" in fields:
            fields["structured_outputs"] = StructuredOutputsParams(**fields["structured_outputs"])
        return SamplingParams(**fields)

    def lora_request(self) -> Any:
        from vllm.lora.request import LoRARequest

        return LoRARequest("adapter", 1, self.lora) if self.lora else None

    def put(self, run: Run, name: str) -> None:
        run.put(name, self.prompt, self.sampling(), priority=self.priority, lora_request=self.lora_request())


@dataclass(frozen=True)
class Answer:
    """One returned sequence.

    logprobs: the requested log-probabilities of each token, by token id. cached: tokens of its prompt found in the
    cache. kv: a KV connector's parameters for the place of its KV.
    """

    tokens: list[int]
    finish: str
    stop: Any
    logprobs: list[dict[int, float]] | None
    cached: int = field(default=0, compare=False)
    kv: dict[str, Any] | None = field(default=None, compare=False)

    def all_logprobs(self, vocabulary: int) -> np.ndarray[Any, Any]:
        """Return the log-probabilities in nats, [tokens, vocabulary], if all were requested."""
        assert self.logprobs is not None
        found = np.full((len(self.tokens), vocabulary), -np.inf)
        for row, said in zip(found, self.logprobs, strict=True):
            row[list(said)] = list(said.values())
        return found


def answer_of(output: Any, cached: int, kv: dict[str, Any] | None = None) -> Answer:
    """Return the answer in vLLM's CompletionOutput."""
    said = output.logprobs
    logprobs = None if said is None else [{t: float(p.logprob) for t, p in row.items()} for row in said]
    return Answer(list(output.token_ids), str(output.finish_reason), output.stop_reason, logprobs, cached, kv)


def generate(llm: Any, asks: list[Ask]) -> list[list[Answer]]:
    """Run all requests at once and return the sequences of each."""
    prompts = [{"prompt_token_ids": list(ask.prompt)} for ask in asks]
    loras = [ask.lora_request() for ask in asks]
    outputs = llm.generate(
        prompts,
        [ask.sampling() for ask in asks],
        use_tqdm=False,
        lora_request=loras if any(loras) else None,
        priority=[ask.priority for ask in asks] if any(ask.priority for ask in asks) else None,
    )
    return [
        [answer_of(o, output.num_cached_tokens or 0, output.kv_transfer_params) for o in output.outputs]
        for output in outputs
    ]
