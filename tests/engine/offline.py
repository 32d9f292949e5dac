"""The independent computation with which signals are compared: Transformers on the same tokens."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from meridian_agent.core.phases import FLAG_END, FLAG_MARKER, Phase
from tests.engine.matrix.builds import ON_GPU
from tests.processes import MODEL

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    Logprobs = Callable[..., NDArray[np.float64]]

# Sequences that are computed at once.
BATCH = 16
# How far entropies of one of the test models' small vocabularies may be apart, and the ids that such a vocabulary has.
# The layers of a GPU differ more from those of Transformers on a CPU.
TOLERANCE_NATS, FEW_IDS = 1e-4 if ON_GPU else 1e-5, 1024
# How far a logit may be apart from the same logit added up in another order: both are sums of some hundred products in
# float32, and numbers of up to 32 nats have a spacing of 2**-19.
LOGIT_NATS = 2.0**-15


def load(folder: Path = MODEL) -> Logprobs:
    """Load the model of a folder.

    Return a function from sequences of token ids to the log-probabilities after the newest token of each, which are
    [sequences, vocabulary] in float64; with `everywhere=True` from one sequence to those after each token, which are
    [tokens, vocabulary].
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def batch(sequences: Sequence[list[int]], everywhere: bool) -> torch.Tensor:
        # Padding comes last, so no token attends to it.
        longest = max(map(len, sequences))
        padded = torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens in sequences])
        hidden = model.model(padded).last_hidden_state
        newest = [(row, len(tokens) - 1) for row, tokens in enumerate(sequences)]
        chosen = hidden[0] if everywhere else torch.stack([hidden[row, at] for row, at in newest])
        logits: torch.Tensor = model.lm_head(chosen)
        return logits

    def logprobs(*sequences: list[int], everywhere: bool = False) -> NDArray[np.float64]:
        with torch.no_grad():
            starts = range(0, len(sequences), BATCH)
            logits = torch.cat([batch(sequences[start : start + BATCH], everywhere) for start in starts])
        found: NDArray[np.float64] = torch.log_softmax(logits.double(), dim=-1).numpy()
        return found

    return logprobs


def entropy(logprobs: NDArray[np.float64]) -> float:
    """Return the entropy in nats of one distribution [vocabulary]."""
    return float(-(np.exp(logprobs) * logprobs).sum())


def tolerance(logprobs: NDArray[np.float64]) -> float:
    """Return how far the entropy of one distribution [vocabulary] may be from that of the same logits added up in
    another order, in nats.

    If no logit is off by more than d, the entropy is off by at most d * sum(p * |log p + H|), apart from smaller terms.
    The sum grows with the number of ids among which the probability is spread.
    """
    if len(logprobs) <= FEW_IDS:
        return TOLERANCE_NATS
    spread = (np.exp(logprobs) * np.abs(logprobs + entropy(logprobs))).sum()
    return max(TOLERANCE_NATS, LOGIT_NATS * float(spread))


def ranks(logprobs: NDArray[np.float64], end: int) -> range:
    """Return the ranks that the end marker may have in one distribution [vocabulary] if the same logits are added up in
    another order: among very many ids some are as likely as the marker, but for the last digits."""
    apart = 2 * LOGIT_NATS if len(logprobs) > FEW_IDS else 0.0
    ahead = np.delete(logprobs, end) - logprobs[end]
    return range(1 + int((ahead > apart).sum()), 2 + int((ahead > -apart).sum()))


def probe_mismatches(
    logprobs: Logprobs, prompt: list[int], tokens: list[int], probes: list[Any], appended: list[int]
) -> list[str]:
    """Return probes whose EAT is off by more than the tolerance, or whose number of equal answers in a row is wrong."""
    found, answers = [], []
    after = logprobs(*([*prompt, *tokens[: probe.think_tokens], *appended] for probe in probes)) if probes else ()
    for probe, expected in zip(probes, after, strict=True):
        answers.append(int(expected.argmax()))
        run = len(list(itertools.takewhile(lambda answer: answer == answers[-1], reversed(answers))))
        if not abs(probe.eat_nats - entropy(expected)) <= tolerance(expected) or probe.same_answer != run:
            found.append(f"{probe}, expected EAT {entropy(expected)}, {run} in a row")
    return found


def mismatches(logprobs: Logprobs, prompt: list[int], tokens: list[int], measured: list[Any], end: int) -> list[str]:
    """Return tokens whose entropy differs by more than the tolerance, or whose end-marker rank is not one of `ranks`.

    Answers need not be measured, nor markers that begin another thinking.
    """
    expected = logprobs(prompt + tokens, everywhere=True)[len(prompt) - 1 :]
    found = [] if len(measured) == len(tokens) else [f"{len(measured)} rows for {len(tokens)} tokens"]
    for i, (phase, flags, entropy_nats, end_rank, *_) in enumerate(measured):
        answers = phase == Phase.OUTPUT or (flags & FLAG_MARKER and not flags & FLAG_END)
        if answers and np.isnan(entropy_nats) and end_rank == 0:
            continue
        wanted, possible = entropy(expected[i]), ranks(expected[i], end)
        if not abs(entropy_nats - wanted) <= tolerance(expected[i]) or end_rank not in possible:
            found.append(f"token {i}: entropy {entropy_nats} for {wanted}, rank {end_rank} for {possible}")
    return found
