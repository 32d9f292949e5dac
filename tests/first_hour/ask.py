"""Ask the engine of the guide for the ends of walks through mazes, and print how long it thought and how often it was
right. With --labels, also write how likely each answer would have been right if its thinking had ended earlier."""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import statistics
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tests.data import maze

MODEL = Path(__file__).parents[1] / "data" / "maze-qwen3"
# Requests in flight, fewer than the engine runs at once, so that EAT probes find a place.
AT_ONCE = 16


def labels(name: str, prompt: str, answer: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the labels of one answer: the probability of the right answer after each thinking token, computed with
    Transformers from the output's token ids."""
    completion = answer["choices"][0]["token_ids"]
    trace = _subject().trace(prompt, answer["prompt_token_ids"], completion)
    for tokens, chance in enumerate(trace.chance):
        yield {"request_id": name, "think_tokens": tokens, "correct": round(min(1.0, chance), 6)}
    ended = answer["choices"][0]["finish_reason"] == "stop"
    yield {"request_id": name, "correct": round(min(1.0, trace.chance[-1]), 6) if ended else 0.0}


@functools.cache
def _subject() -> Any:
    # Transformers takes seconds to import, and draws a progress bar.
    from transformers.utils import logging

    from tests.data import measure

    logging.disable_progress_bar()
    return measure.Subject(measure.TASKS["maze"], MODEL)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.first_hour.ask", description=__doc__)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--port", type=int, default=int(os.environ.get("FIRST_HOUR_PORT", "8000")))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--labels", type=Path, help="file to add the labels to, as lines of JSON")
    asked = parser.parse_args()
    rng = random.Random(asked.seed)
    mazes = [maze.make_maze(rng) for _ in range(asked.requests)]

    def ask(number: int) -> dict[str, Any]:
        body = {
            "model": "maze",
            "messages": [{"role": "user", "content": mazes[number].prompt}],
            "request_id": f"ask-{asked.seed}-{number}",
            "seed": number,
            "max_tokens": 700,
            "return_token_ids": True,
        }
        url = f"http://127.0.0.1:{asked.port}/v1/chat/completions"
        answer: dict[str, Any] = httpx.post(url, json=body, timeout=600).raise_for_status().json()
        return answer

    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(ask, range(asked.requests)))
    messages = [answer["choices"][0]["message"] for answer in answers]
    tokens = statistics.fmean(len((message.get("reasoning") or "").split()) for message in messages)
    said = [(message.get("content") or "").split()[:1] for message in messages]
    right = sum(first == [asked_of.answer] for first, asked_of in zip(said, mazes, strict=True))
    print(f"{len(answers)} answers, {right} of them right, after {tokens:.0f} thinking tokens on average")
    if asked.labels:
        with asked.labels.open("a") as file:
            for number, answer in enumerate(answers):
                for row in labels(f"ask-{asked.seed}-{number}", mazes[number].prompt, answer):
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
