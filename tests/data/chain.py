"""The chain task: seeded chains of operations on one digit, thinking traces, and judging. Standard library only.

The prompt gives a start digit and 4 to 14 operations, each with a letter. All arithmetic keeps only the last digit, and
the answer is the digit after the last operation.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from tests.data.maze import END_THINK, PARAGRAPH, STOP, THINK, WAIT

LABELS = tuple("abcdefghijklmn")
DIGITS = tuple("0123456789")
OPERATIONS = (*(f"+{n}" for n in range(1, 10)), *(f"-{n}" for n in range(1, 10)), "*2", "*3", "*7", "*9", "flip")
CHECK = "Check"
CONNECTORS = ("Now", "Then", "Next")
WORDS = (":", "on", "gives", "over", "borrow", "so", "again", "quick", "back")
ANSWER_PREFIX = ("The", "result", "is")
MIN_STEPS, MAX_STEPS = 4, len(LABELS)


def apply(value: int, operation: str) -> tuple[int, list[str]]:
    """Return the digit that an operation makes of a digit, and the words for the intermediate number if there is
    one."""
    if operation == "flip":
        return 9 - value, []
    sign, number = operation[0], int(operation[1:])
    if sign == "-":
        return (value - number) % 10, ["borrow", str(value + 10), "so"] if value < number else []
    raw = value + number if sign == "+" else value * number
    return raw % 10, ["over", str(raw), "so"] if raw > 9 else []


@dataclass(frozen=True)
class Chain:
    """A start digit and the operations on it, in order; the first operation is called a, the next b, and so on."""

    start: int
    operations: tuple[str, ...]

    @property
    def prompt(self) -> str:
        """Return the content of the user message."""
        steps = zip(LABELS, self.operations, strict=False)
        return f"start {self.start} " + " ".join(f"{label}:{operation}" for label, operation in steps)

    @property
    def values(self) -> list[int]:
        """Return the start digit and the digit after each operation."""
        values = [self.start]
        for operation in self.operations:
            values.append(apply(values[-1], operation)[0])
        return values

    @property
    def answer(self) -> str:
        """Return the digit after the last operation."""
        return str(self.values[-1])


def make_chain(rng: random.Random) -> Chain:
    """Return a random chain; adding, subtracting, multiplying and flipping are drawn as 7 to 7 to 6 to 2."""
    count = rng.randint(MIN_STEPS, MAX_STEPS)
    kinds = rng.choices((OPERATIONS[:9], OPERATIONS[9:18], OPERATIONS[18:22], OPERATIONS[22:]), (7, 7, 6, 2), k=count)
    return Chain(rng.randrange(10), tuple(rng.choice(kind) for kind in kinds))


def parse_prompt(prompt: str) -> Chain:
    """Return the chain that a prompt lists."""
    start = re.search(r"\bstart (\d)(?!\S)", prompt)
    steps = re.findall(r"(?<!\S)([a-n]):([+-][1-9]|\*[2379]|flip)(?!\S)", prompt)
    if not start or not steps or [label for label, _ in steps] != list(LABELS[: len(steps)]):
        raise ValueError("not a chain prompt")
    return Chain(int(start.group(1)), tuple(operation for _, operation in steps))


def prompts(count: int, seed: int = 0) -> list[str]:
    """Return seeded prompts; the same seed always gives the same list."""
    rng = random.Random(f"chain-{seed}")
    return [make_chain(rng).prompt for _ in range(count)]


def pass_over(rng: random.Random, chain: Chain, slip: int | None = None) -> list[str]:
    """Return one pass: every step as a sentence, in wording that varies; the step with index `slip` goes wrong."""
    value, tokens = chain.start, ["start", str(chain.start), STOP]
    for index, (label, operation) in enumerate(zip(LABELS, chain.operations, strict=False)):
        result, between = apply(value, operation)
        if index == slip:
            result = rng.choice([other for other in range(10) if other != result])
        lead = [rng.choice(CONNECTORS)] if rng.random() < 0.3 else []
        link = ["on", str(value), "gives"] if rng.random() < 0.4 else [":"]
        tokens += [*lead, label, operation, *link, *between, str(result), STOP]
        value = result
    return tokens


def _slipped(rng: random.Random, chain: Chain) -> list[str]:
    """Return a first pass with one wrong step and a wrong result.

    Multiplying by 2 may hide a slip, so several draws may be needed.
    """
    while True:
        tokens = pass_over(rng, chain, rng.randrange(len(chain.operations)))
        if tokens[-2] != chain.answer:
            return tokens


def _recheck(rng: random.Random, chain: Chain, form: str) -> list[str]:
    """Return the chain once more: in whole sentences, in one short sentence with the values, or with the values
    reversed."""
    opening = [PARAGRAPH, rng.choice((CHECK, WAIT)), form]
    named = list(zip(LABELS, map(str, chain.values[1:]), strict=False))
    if form == "again":
        return [*opening, *pass_over(rng, chain)]
    if form == "quick":
        return [*opening, *(token for pair in named for token in pair), STOP]
    return [*opening, *(token for label, value in reversed(named) for token in (label, value, STOP))]


def thinking(rng: random.Random, chain: Chain, rechecks: int = 8, slips: float = 0.025) -> list[list[str]]:
    """Return the tokens of each pass of one trace: a first pass, then 0 to `rechecks` re-checks, fewer being more
    likely.

    With probability `slips` the first pass has one wrong step, and then the first re-check repeats all of it.
    """
    slip = rechecks > 0 and rng.random() < slips
    count = max(int(slip), min(rng.randint(0, rechecks), rng.randint(0, rechecks)))
    forms = rng.choices(("again", "quick", "back"), (3, 4, 3), k=count)
    if slip:
        forms[0] = "again"
    first = _slipped(rng, chain) if slip else pass_over(rng, chain)
    return [first, *(_recheck(rng, chain, form) for form in forms)]


def answer_tokens(chain: Chain) -> list[str]:
    """Return the tokens of the answer; the digit comes after the prefix."""
    return [*ANSWER_PREFIX, chain.answer, STOP]


def answer_of(text: str) -> str | None:
    """Return the digit with which a completion answers, or None if the text after the thinking is not an answer."""
    if THINK in text and END_THINK not in text:
        return None
    answer = text.rpartition(END_THINK)[2].split()
    if tuple(answer[:3]) == ANSWER_PREFIX:
        answer = answer[3:]
    return answer[0] if answer and answer[0] in DIGITS else None


def is_correct(prompt: str, text: str) -> bool:
    """Return whether a completion (with or without its thinking) answers the prompt correctly."""
    return answer_of(text) == parse_prompt(prompt).answer
