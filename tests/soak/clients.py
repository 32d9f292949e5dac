"""Clients that stream from the server and check every answer. Owns the answers and the complaints about them.

The module does not know the control plane; a function passed in says whether anything was decided meanwhile. The module
has one event loop.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.soak import asks

# Timeout of a request, longer than any fault may delay it.
TIMEOUT_S = 120.0
PAUSE_S = 0.2
BURST, BURST_CHANCE = 12, 0.02


@dataclass
class Tally:
    """The clients' counts.

    longest_stall_s: longest time without a token of any request while some request was being answered.
    """

    requests: int = 0
    tokens: int = 0
    compared: int = 0
    untouched: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    # Number of choices begun, to compare with vLLM's own count of requests.
    choices: int = 0
    last_token_s: float = 0.0
    longest_stall_s: float = 0.0


class Clients:
    """Some clients, each of which sends one request after the other, and occasional bursts.

    untouched: returns a number that is even while nothing can change an answer, and that changes when such a time
    begins or ends. A request was left alone if the number is even and the same at its begin and its end.
    """

    def __init__(
        self,
        url: str,
        rng: random.Random,
        stock: dict[str, list[list[int]]],
        decode: Callable[[Sequence[int]], str],
        untouched: Callable[[], int],
    ) -> None:
        self._rng, self._stock, self._decode, self._untouched = rng, stock, decode, untouched
        # Each request has its own connection, because the server may close a kept one just when it is used again.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._http = httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(TIMEOUT_S), limits=limits)
        self.tally = Tally()
        self._under_way = 0
        self._stopped = asyncio.Event()

    async def run(self, count: int) -> None:
        """Run until `stop`, and then until the requests under way have ended."""
        async with self._http, asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(self._client(group))

    def stop(self) -> None:
        self._stopped.set()

    async def _client(self, group: asyncio.TaskGroup) -> None:
        while not self._stopped.is_set():
            if self._rng.random() < BURST_CHANCE:
                for _ in range(BURST):
                    group.create_task(self._ask(asks.draw(self._rng)))
            await self._ask(asks.draw(self._rng))
            await asyncio.sleep(self._rng.expovariate(1 / PAUSE_S))

    async def _ask(self, ask: asks.Ask) -> None:
        tally, before = self.tally, self._untouched()
        tally.requests += 1
        tally.kinds[ask.kind] += 1
        tally.choices += ask.body.get("n", 1)
        self._under_way += 1
        if self._under_way == 1:
            tally.last_token_s = time.monotonic()
        try:
            answers = await self._stream(ask)
        except (httpx.HTTPError, ValueError, KeyError) as error:
            self._note(tally.failed, f"{ask.kind} {json.dumps(ask.body)[:300]}: {type(error).__name__}: {error}"[:800])
            return
        finally:
            self._under_way -= 1
        if ask.leaves_after is None:
            untouched = before == self._untouched() and before % 2 == 0
            for answer in answers.values():
                self._judge(ask, answer, untouched)
            if ask.follow_up:
                await self._ask(asks.next_turn(ask, answers[0]))

    def _judge(self, ask: asks.Ask, answer: asks.Answer, untouched: bool) -> None:
        found = asks.complaints(ask, answer, self._decode)
        if ask.known is not None and not ask.body.get("structured_outputs"):
            self.tally.compared += 1
            self.tally.untouched += untouched and not ask.own_cap
            found += asks.against_stock(ask, answer, self._stock[ask.mode][ask.known], untouched)
        if found:
            what = f"{ask.kind} {answer.name} {json.dumps(ask.body)[:300]}: {'; '.join(found)}"
            self._note(self.tally.complaints, f"{what}; its tokens: {answer.tokens}")

    def _note(self, where: list[str], what: str) -> None:
        """Note a complaint with its time, which the logs have, too."""
        where.append(f"{time.strftime('%H:%M:%S')} {what}")
        print(where[-1], flush=True)

    async def _stream(self, ask: asks.Ask) -> dict[int, asks.Answer]:
        """Send the request and read its stream. Raises httpx.HTTPError, and ValueError for a malformed answer."""
        more: dict[str, Any] = {"model": "maze", "stream": True, "return_token_ids": True}
        more["stream_options"] = {"include_usage": True}
        answers: dict[int, asks.Answer] = {}
        used, pieces = -1, 0
        async with self._http.stream("POST", "/v1/chat/completions", json=ask.body | more) as response:
            if response.status_code != 200:
                raise ValueError(f"status {response.status_code}: {(await response.aread())[:300]!r}")
            async for line in response.aiter_lines():
                if ask.leaves_after is not None and pieces >= ask.leaves_after:
                    return answers
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                piece = json.loads(line[6:])
                if "error" in piece:
                    raise ValueError(f"an error in the stream: {piece['error']}")
                pieces += 1
                if piece.get("usage"):
                    used = piece["usage"]["completion_tokens"]
                self._take(piece, answers)
        if used != (got := sum(len(a.tokens) for a in answers.values())):
            self._note(self.tally.complaints, f"{ask.kind}: usage counts {used} tokens, {got} came")
        if not all(answer.finish for answer in answers.values()) or len(answers) != ask.body.get("n", 1):
            raise ValueError("the stream broke off")
        return answers

    def _take(self, piece: dict[str, Any], answers: dict[int, asks.Answer]) -> None:
        for choice in piece["choices"]:
            answer = answers.setdefault(choice["index"], asks.Answer(piece["id"]))
            tokens = choice.get("token_ids") or []
            answer.tokens += tokens
            answer.reasoning += choice["delta"].get("reasoning") or ""
            answer.content += choice["delta"].get("content") or ""
            answer.finish = choice.get("finish_reason") or answer.finish
            if tokens:
                self._came(len(tokens))

    def _came(self, tokens: int) -> None:
        now, tally = time.monotonic(), self.tally
        tally.tokens += tokens
        tally.longest_stall_s = max(tally.longest_stall_s, now - tally.last_token_s)
        tally.last_token_s = now
