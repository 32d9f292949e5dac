"""The load: concurrent streaming chat requests through the OpenAI API, timed as a client sees them.

The module owns the requests and their results. The module knows nothing of the control plane; the caller decides when
the policy changes. The module has one event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from openai import AsyncOpenAI

from tests.data import maze

if TYPE_CHECKING:
    from collections.abc import Sequence

    from openai.types.chat import ChatCompletionChunk

MODEL = "maze"
TEMPERATURE = 1.0
MAX_TOKENS = 700
REQUEST_TIMEOUT_S = 120.0
PAUSE_AFTER_ERROR_S = 1.0

# Periods of a request: the first round, the requests sent while it finishes and the policy changes, and the second
# round.
PERIODS = BEFORE, ACROSS, AFTER = "before", "across", "after"


@dataclass(slots=True)
class Sample:
    """One request. Times are time.time() seconds, NaN for events that did not happen. period: one of PERIODS."""

    period: str
    number: int
    """Number of the prompt, which is also the sampling seed."""
    prompt: str
    sent_s: float
    completion_id: str = ""
    think_began_s: float = math.nan
    think_ended_s: float = math.nan
    """Arrival time of the last piece of thinking."""
    answer_s: list[float] = field(default_factory=list)
    """Arrival time of each piece of the answer."""
    done_s: float = math.nan
    answer: str = ""
    think_chunks: int = 0
    think_tokens_of_usage: int | None = None
    error: str = ""

    @property
    def finished(self) -> bool:
        return not math.isnan(self.done_s)

    @property
    def think_tokens(self) -> int:
        """Return the thinking tokens as the server counts them, or the pieces of thinking if the server does not."""
        return self.think_chunks if self.think_tokens_of_usage is None else self.think_tokens_of_usage

    @property
    def correct(self) -> bool:
        return maze.is_correct(self.prompt, self.answer)

    @property
    def ttot_ms(self) -> float:
        """Return the time from the last piece of thinking to the first of the answer, or NaN if either is missing."""
        return (self.answer_s[0] - self.think_ended_s) * 1e3 if self.answer_s else math.nan

    @property
    def answer_gaps_ms(self) -> list[float]:
        return [(b - a) * 1e3 for a, b in zip(self.answer_s, self.answer_s[1:], strict=False)]

    def take(self, chunk: ChatCompletionChunk, now_s: float) -> None:
        """Record one piece of the stream."""
        self.completion_id = chunk.id
        if chunk.usage is not None and chunk.usage.completion_tokens_details is not None:
            self.think_tokens_of_usage = chunk.usage.completion_tokens_details.reasoning_tokens
        for choice in chunk.choices:
            # vLLM's own field; the client library keeps fields that its model does not name.
            if getattr(choice.delta, "reasoning", None):
                self.think_ended_s = now_s
                if not self.think_chunks:
                    self.think_began_s = now_s
                self.think_chunks += 1
            if choice.delta.content:
                self.answer_s.append(now_s)
                self.answer += choice.delta.content


class Load:
    """Keeps a number of requests in flight: the prompts once, then further ones until `send_rest`, then the prompts
    again.

    The requests between the two rounds only keep the engine under load. So both rounds have the same prompts and
    sampling seeds, and the change of policy, which waits for the whole first round, cuts off no long request of either.

    tenants: those of the prompts, in turn.
    """

    def __init__(self, base_url: str, prompts: Sequence[str], tenants: Sequence[str] = ()) -> None:
        self._tenants = tenants
        self._client = AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=REQUEST_TIMEOUT_S)
        self._prompts = prompts
        count = len(prompts)
        self._jobs = ((BEFORE if n < count else ACROSS, n % count) for n in itertools.count())
        self._done = asyncio.Condition()
        self.samples: list[Sample] = []

    async def run(self, concurrency: int) -> None:
        """Send requests until the second round is done."""
        async with self._client, asyncio.TaskGroup() as workers:
            for _ in range(concurrency):
                workers.create_task(self._work())

    async def first_round(self) -> None:
        """Wait until the first round is done, failed requests included."""

        def done() -> bool:
            return sum(s.finished for s in self.samples if s.period == BEFORE) == len(self._prompts)

        async with self._done:
            await self._done.wait_for(done)

    def send_rest(self) -> None:
        """Send the second round from now on."""
        self._jobs = ((AFTER, n) for n in range(len(self._prompts)))

    async def _work(self) -> None:
        while (job := next(self._jobs, None)) is not None:
            period, number = job
            sample = Sample(period, number, self._prompts[number], time.time())
            self.samples.append(sample)
            await self._ask(sample)
            sample.done_s = time.time()
            async with self._done:
                self._done.notify_all()
            if sample.error:
                await asyncio.sleep(PAUSE_AFTER_ERROR_S)

    async def _ask(self, sample: Sample) -> None:
        """Send one request and read its stream; an error is kept in the sample."""
        own: dict[str, Any] = {}
        if self._tenants:
            own["vllm_xargs"] = {"meridian_tenant": self._tenants[sample.number % len(self._tenants)]}
        try:
            stream = await self._client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": sample.prompt}],
                temperature=TEMPERATURE,
                seed=sample.number,
                max_tokens=MAX_TOKENS,
                stream=True,
                stream_options={"include_usage": True},
                extra_body=own,
            )
            async for chunk in stream:
                sample.take(chunk, time.time())
        except Exception as error:
            # The client library lets errors of its HTTP library through.
            sample.error = f"{type(error).__name__}: {error}"
        if not sample.error and not sample.think_chunks and not sample.answer_s:
            sample.error = "an empty stream"
