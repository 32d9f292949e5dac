"""Ask the engine of the guide for the ends of walks through mazes, and print how long it thought and how often it was
right."""

from __future__ import annotations

import argparse
import os
import random
import statistics
from concurrent.futures import ThreadPoolExecutor

import httpx

from tests.data import maze

# Requests in flight, fewer than the engine runs at once, so that EAT probes find a place.
AT_ONCE = 6


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.first_hour.ask", description=__doc__)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--port", type=int, default=int(os.environ.get("FIRST_HOUR_PORT", "8000")))
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    rng = random.Random(asked.seed)
    mazes = [maze.make_maze(rng) for _ in range(asked.requests)]

    def ask(number: int) -> tuple[int, bool]:
        body = {
            "model": "maze",
            "messages": [{"role": "user", "content": mazes[number].prompt}],
            "request_id": f"ask-{number}",
            "seed": number,
            "max_tokens": 700,
        }
        answer = (
            httpx.post(f"http://127.0.0.1:{asked.port}/v1/chat/completions", json=body, timeout=600)
            .raise_for_status()
            .json()["choices"][0]["message"]
        )
        said = (answer.get("content") or "").split()
        return len((answer.get("reasoning") or "").split()), said[:1] == [mazes[number].answer]

    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(ask, range(asked.requests)))
    tokens = statistics.fmean(count for count, _ in answers)
    right = sum(correct for _, correct in answers)
    print(f"{len(answers)} answers, {right} of them right, after {tokens:.0f} thinking tokens on average")


if __name__ == "__main__":
    main()
