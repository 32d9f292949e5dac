"""The maze task: seeded maps, prompts, thinking traces, and the judging of answers. Standard library only.

A map has 24 nodes and one outgoing edge per node; some nodes point at themselves. The prompt lists the edges in random
order and names a start; the answer is the self-pointing node where the walk from the start ends.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

NODES = tuple("ABCDEFGHIJKLMNOPQRSTUVWX")
THINK, END_THINK = "<think>", "</think>"
STOP, WAIT, PARAGRAPH, NEWLINE = ".", "Wait", "\n\n", "\n"
ANSWER_WORDS = ("is", "where", "the", "walk", "from", "ends")
MIN_HOPS, MAX_HOPS, MAX_WALK = 3, 14, 18


@dataclass(frozen=True)
class Maze:
    """One map in the order in which its edges are listed, with the start of the walk."""

    edges: tuple[tuple[str, str], ...]
    start: str

    @property
    def prompt(self) -> str:
        """Return the content of the user message."""
        return " ".join(f"{a}>{b}" for a, b in self.edges) + f" start {self.start}"

    @property
    def answer(self) -> str:
        """Return the node where the walk from the start ends."""
        return self.walk(self.start)[-1][1]

    def walk(self, start: str) -> list[tuple[str, str]]:
        """Return the hops from a node to its self-pointing end, including that end's own edge; in a loop the hops are
        cut short."""
        hops: list[tuple[str, str]] = []
        step, node = dict(self.edges), start
        while len(hops) < MAX_WALK:
            hops.append((node, step[node]))
            if step[node] == node:
                break
            node = step[node]
        return hops


def make_maze(rng: random.Random, ends: int = 5) -> Maze:
    """Return a random map with this many self-pointing nodes; the walk from its start takes 3 to 14 hops."""
    nodes, count = rng.sample(NODES, len(NODES)), rng.randint(MIN_HOPS, MAX_HOPS)
    path, rest = nodes[:count], nodes[count:]
    step = dict(zip(path, [*path[1:], path[-1]], strict=True))
    for index, node in enumerate(rest):
        step[node] = node if index < ends - 1 else rng.choice([other for other in NODES if other != node])
    return Maze(tuple((node, step[node]) for node in rng.sample(NODES, len(NODES))), path[0])


def parse_prompt(prompt: str) -> Maze:
    """Return the map that a prompt lists."""
    edges = tuple((a, b) for a, b in re.findall(r"\b([A-X])>([A-X])\b", prompt))
    found = re.search(r"\bstart ([A-X])\b", prompt)
    if len(dict(edges)) != len(NODES) or not found:
        raise ValueError("not a maze prompt")
    return Maze(edges, found.group(1))


def prompts(count: int, seed: int = 0) -> list[str]:
    """Return seeded prompts; the same seed always gives the same list."""
    rng = random.Random(f"maze-{seed}")
    return [make_maze(rng).prompt for _ in range(count)]


def _slip(rng: random.Random, maze: Maze, walk: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the walk with one wrong hop, continued to another self-pointing node; unchanged if there is no such
    hop."""
    for _ in range(8):
        at = rng.randrange(len(walk) - 1)
        tail = maze.walk(rng.choice(NODES))
        slipped = [*walk[:at], (walk[at][0], tail[0][0]), *tail]
        ends_elsewhere = tail[-1][0] == tail[-1][1] != walk[-1][1]
        if ends_elsewhere and len(slipped) <= MAX_WALK:
            return slipped
    return walk


def thinking(rng: random.Random, maze: Maze, rewalks: int = 9, slips: float = 0.1) -> list[list[str]]:
    """Return the tokens of each walk of one trace: a first walk, then 0 to `rewalks` re-walks, each opened by Wait.

    With probability `slips` the first walk has one wrong hop, and then at least one re-walk follows and is right.
    """
    walk = maze.walk(maze.start)
    first = _slip(rng, maze, walk) if rng.random() < slips else walk
    again = rng.randint(int(first != walk), rewalks)
    spelled = [token for a, b in walk for token in (a, b, STOP)]
    return [[token for a, b in first for token in (a, b, STOP)], *[[PARAGRAPH, WAIT, *spelled] for _ in range(again)]]


def answer_tokens(maze: Maze) -> list[str]:
    """Return the tokens of the answer; the first one is the answer itself."""
    before, after = ANSWER_WORDS[:5], ANSWER_WORDS[5:]
    return [maze.answer, *before, maze.start, *after, STOP]


def text_of(tokens: Sequence[str]) -> str:
    """Return the text of these tokens: single spaces, none beside a line break or a think marker."""
    return re.sub(r" (?=\n|</think>)|(?<=\n) |(?<=think>) ", "", " ".join(tokens))


def answer_of(text: str) -> str | None:
    """Return the node with which a completion answers: the first word after the thinking, if that word is a node."""
    if THINK in text and END_THINK not in text:
        return None
    words = text.rpartition(END_THINK)[2].split()
    return words[0] if words and words[0] in NODES else None


def is_correct(prompt: str, text: str) -> bool:
    """Return whether a completion (with or without its thinking) answers the prompt correctly."""
    return answer_of(text) == parse_prompt(prompt).answer
