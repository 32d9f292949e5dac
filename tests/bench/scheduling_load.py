"""Seeded requests and open-loop arrivals for the scheduling benchmark. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from tests.bench.random_model import FIRST_WORD, LAST_WORD
from tests.bench.streamed import Request

Process = Literal["poisson", "gamma"]
GAMMA_CV = 2.0
# Log-normal lengths in tokens: median, standard deviation of the logarithm, lower limit, upper limit.
THINK, ANSWER = (100.0, 0.5, 20, 400), (40.0, 0.4, 12, 120)
PROMPT = 50, 300


@dataclass(frozen=True)
class Arrival:
    """One request and its arrival time, in seconds from the start of the run.

    counted: whether its latency counts; False for the requests that are present when the run begins.
    """

    request: Request
    at_s: float
    counted: bool


def _lengths(rng: Generator, count: int, shape: tuple[float, float, int, int]) -> NDArray[np.int64]:
    median, sigma, low, high = shape
    return np.clip(rng.lognormal(np.log(median), sigma, count), low, high).round().astype(np.int64)


def requests(seed: int, count: int) -> list[Request]:
    """Return requests whose prompts share no prefix; the same seed always gives the same requests."""
    rng = np.random.default_rng(seed)
    thinks, answers = _lengths(rng, count, THINK), _lengths(rng, count, ANSWER)
    prompts = rng.integers(*PROMPT, count, endpoint=True)
    return [
        Request(f"{seed}-{i}", prompt(rng, int(size)), int(think), int(answer))
        for i, (size, think, answer) in enumerate(zip(prompts, thinks, answers, strict=True))
    ]


def prompt(rng: Generator, tokens: int) -> tuple[int, ...]:
    """Return random words and, as the last token, the marker that opens thinking, as a chat template would."""
    words = rng.integers(FIRST_WORD, LAST_WORD, tokens - 1, endpoint=True).tolist()
    return (*words, 4)


def uniform(count: int, prompt_tokens: int, think_tokens: int, seed: int = 0) -> list[Request]:
    """Return requests of one length that think and answer with a single token."""
    rng = np.random.default_rng(seed)
    return [Request(f"u{seed}-{count}-{i}", prompt(rng, prompt_tokens), think_tokens, 1) for i in range(count)]


# Requests that only think, of which more than fit are present, and short ones of a tenant that people wait for.
LONG_THINK, SHORT_ANSWER, BEHIND = 300, 8, 8
FILLED_S, PAUSE_MS, URGENT = 2.0, 100, "interactive"


def thinkers(seed: int, count: int = 4096) -> Iterator[Request]:
    """Yield requests that think for LONG_THINK tokens, half of it in the mean of the first ones."""
    rng = np.random.default_rng([seed, 3])
    for i in range(count):
        think = int(rng.integers(LONG_THINK // 2, LONG_THINK * 3 // 2))
        yield Request(f"t{seed}-{i}", prompt(rng, PROMPT[0]), think, 1)


def urgent(seed: int, count: int) -> list[Request]:
    """Return short requests that hardly think."""
    rng = np.random.default_rng([seed, 4])
    return [Request(f"q{seed}-{i}", prompt(rng, PROMPT[0]), 1, SHORT_ANSWER, tenant=URGENT) for i in range(count)]


def gaps(process: Process, rate: float, count: int, seed: int) -> NDArray[np.float64]:
    """Return the seconds between arrivals, scaled so that their mean is exactly 1 / rate."""
    rng = np.random.default_rng([seed, 1])
    shape = 1.0 if process == "poisson" else 1 / GAMMA_CV**2
    drawn = rng.gamma(shape, 1 / shape, count)
    scaled: NDArray[np.float64] = drawn / drawn.mean() / rate
    return scaled


def open_loop(process: Process, rate: float, seed: int, present: int, counted: int) -> list[Arrival]:
    """Return the arrivals of a run: `present` requests at its beginning, each with part of its thinking left, then
    others.

    The share of thinking left is drawn uniformly, so that the run begins near its steady state.
    """
    drawn = requests(seed, present + counted)
    left = np.random.default_rng([seed, 2]).uniform(0, 1, present)
    first = [
        Arrival(Request(r.name, r.prompt, max(1, int(r.think_tokens * part)), r.answer_tokens), 0.0, False)
        for r, part in zip(drawn[:present], left, strict=True)
    ]
    at_s = np.cumsum(gaps(process, rate, counted, seed))
    return first + [Arrival(r, float(t), True) for r, t in zip(drawn[present:], at_s, strict=True)]
