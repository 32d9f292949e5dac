"""Text that repeats itself for a reason, and is no loop: source code, tables, sums, records.

The corpus is Python's standard library and generated text of the kinds that reasoning models write. A pattern of words,
numbers and signs cuts text into tokens roughly as the vocabularies of large models do.
"""

from __future__ import annotations

import json
import re
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from meridian_agent.core.token_cycles import LOOK_TOKENS, TokenCycle, TokenTail
from meridian_control.policy.schema import LoopPolicy

TOKEN = re.compile(r" ?[A-Za-z_]+| ?\d{1,3}| ?[^\sA-Za-z0-9_]{1,8}|\s+")
LEAST_TOKENS = 100_000
ENOUGH_TOKENS = 200_000


def tokens_of(text: str, ids: dict[str, int]) -> list[int]:
    return [ids.setdefault(piece, len(ids)) for piece in TOKEN.findall(text)]


def would_end(tokens: list[int], rounds: int = LoopPolicy().min_rounds, least: int = LoopPolicy().min_tokens) -> int:
    """Return after how many tokens the default rule would end this text; 0 for never."""
    tail = TokenTail()
    for seen in range(LOOK_TOKENS, len(tokens) + LOOK_TOKENS, LOOK_TOKENS):
        tail.take(tokens[:seen])
        cycle: TokenCycle | None = tail.cycle(seen)
        if cycle is not None and cycle.tokens >= rounds * cycle.period and cycle.tokens >= least:
            return min(seen, len(tokens))
    return 0


def library() -> Iterator[str]:
    """Yield the standard library's sources, from its root folder."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        yield path.read_text(encoding="utf-8", errors="replace")


def multiplication() -> str:
    return "\n".join(" | ".join(f"{a} x {b} = {a * b}" for b in range(1, 13)) for a in range(1, 60))


def long_sum() -> str:
    total, lines = 0, []
    for number in range(1, 600):
        lines.append(f"{total} + {number} = {total + number}.")
        total += number
    return " So the sum goes on. ".join(lines)


def table() -> str:
    head = "| step | state | cost | note |\n|---|---|---|---|\n"
    return head + "\n".join(f"| {n} | open | {n * 7 % 10} | none |" for n in range(700))


def records() -> str:
    return json.dumps([{"id": n, "name": f"item {n}", "tags": ["a", "b"], "ok": True} for n in range(500)], indent=1)


def matrix() -> str:
    return "\n".join(" ".join("1" if row == column else "0" for column in range(60)) for row in range(60))


def truth_table() -> str:
    return "\n".join(" ".join("TF"[row >> bit & 1] for bit in range(9, -1, -1)) for row in range(1024))


@pytest.mark.parametrize("text", [multiplication, long_sum, table, records, matrix, truth_table])
def test_generated_text_is_not_ended(text: Callable[[], str]) -> None:
    tokens = tokens_of(text(), {})
    assert len(tokens) > 1500
    assert would_end(tokens) == 0


def test_source_code_is_not_ended() -> None:
    ids: dict[str, int] = {}
    seen, ended = 0, 0
    for text in library():
        tokens = tokens_of(text, ids)
        seen, ended = seen + len(tokens), ended + bool(would_end(tokens))
        if seen > ENOUGH_TOKENS:
            break
    assert seen >= LEAST_TOKENS
    assert ended == 0


def test_a_loop_in_such_text_is_ended() -> None:
    """The same pattern of tokens finds a sentence that is written again and again."""
    ids: dict[str, int] = {}
    before = tokens_of(long_sum(), ids)
    sentence = tokens_of("Wait, let me check this once more. The sum is 42, so the answer must be 42. ", ids)
    at = would_end(before + sentence * 40)
    assert 0 < at - len(before) <= max(4 * len(sentence), 256)
