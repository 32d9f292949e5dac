"""The arms of `make bench-kernels`, each of which queues its work on torch's current stream.

Arms whose library is missing are left out, with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from meridian_kernels import EntropyProbe

OURS, EAGER = "meridian", "torch eager"


@dataclass(frozen=True)
class Arm:
    """One way to compute the signals.

    begin: queue the work for these logits and this end token on the stream. entropy: the result in nats, as a tensor or
    an array [rows].
    """

    begin: Callable[[torch.Tensor, int], Any]
    entropy: Callable[[Any], Any]


def eager(logits: torch.Tensor, end_token: int) -> torch.Tensor:
    """Compute the six columns, [6, rows], in plain torch with log_softmax and sums."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    entropy = -(logprobs.exp() * logprobs).nan_to_num(nan=0.0).sum(dim=-1)
    top = logprobs.max(dim=-1)
    rank = (logits > logits[:, end_token : end_token + 1]).sum(dim=-1) + 1
    lse = (logits.float() - logprobs)[:, 0]
    return torch.stack([entropy, lse, top.values, logprobs[:, end_token], top.indices.float(), rank.float()])


def arms(probe: EntropyProbe, rows: int, vocab: int, device: torch.device) -> tuple[dict[str, Arm], dict[str, str]]:
    """Return the arms by name for logits of this shape, and the reasons why others are missing."""
    found = {
        OURS: Arm(probe.begin, lambda pending: pending.result().entropy_nats),
        EAGER: Arm(eager, lambda columns: columns[0]),
    }
    missing: dict[str, str] = {}
    for name, make in (("torch.compile", _compiled), ("vLLM", _vllm), ("FlashInfer", _flashinfer)):
        try:
            found.update(make(rows, vocab, device))
        except ImportError as error:
            missing[name] = f"{type(error).__name__}: {error}"
    return found, missing


_COMPILED: list[Any] = []


def _compiled(*_: Any) -> dict[str, Arm]:
    if not _COMPILED:
        _COMPILED.append(torch.compile(eager, dynamic=True))
    return {"torch.compile": Arm(_COMPILED[0], lambda columns: columns[0])}


def _vllm(rows: int, _: int, device: torch.device) -> dict[str, Arm]:
    """Return an arm with vLLM's nearest kernel, because vLLM has no op for these signals.

    The one-pass kernel of vLLM's diffusion sampler gives entropy and argmax, and also draws a sample; it gives neither
    the rank nor the log-probability of a token.
    """
    from vllm.model_executor.models.diffusion_gemma_sampler import sample_row_stats

    temperatures = torch.ones(rows, device=device)
    return {
        "vLLM row stats": Arm(lambda logits, _: sample_row_stats(logits, temperatures, 1, 0, None), lambda out: out[2])
    }


def _flashinfer(*_: Any) -> dict[str, Arm]:
    """Return an arm with FlashInfer's softmax, because FlashInfer has no op for these signals.

    The softmax writes all probabilities; the entropy is a sum over them.
    """
    from flashinfer.sampling import softmax

    return {
        "FlashInfer softmax, sum": Arm(lambda logits, _: torch.special.entr(softmax(logits.float())).sum(-1), _as_it_is)
    }


def _as_it_is(out: torch.Tensor) -> torch.Tensor:
    return out
