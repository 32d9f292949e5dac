"""Read recorded thinking for `make bench-replay`: files of the public data set, and our own traces with their labels.

The module owns the public set's format. It turns a file into the columns that a trace of the same requests would have,
so that the rules that decide live judge both in the same way.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from meridian_control.offline.correctness import Judge, from_labels
from meridian_control.offline.episodes import Episodes, collect
from meridian_control.offline.rule_replay import Replay
from meridian_control.policy import formats as forms
from meridian_control.policy.model import Policy
from meridian_control.table.table_columns import CONFIRM_HISTORY, RANK_HISTORY
from tests.bench.program import BenchError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

PUBLIC = "zhengkid/Parallel-Probe"
HOW_TO_GET = (
    f"The public data set is in the repository {PUBLIC}, in the folder evaluation/Qwen3-8B-128: clone the repository "
    "and pass that folder with --data. The set has no licence, so this project contains none of it."
)
# Thinking tokens between two trial answers, unless the file says otherwise.
INTERVAL_TOKENS = 500
# The set's entry for a trial answer that could not be read.
UNREADABLE = "ERR"
# Tokens that a trial answer costs, which has to be generated. The set does not give the number.
WHOLE_TOKENS = 16


@dataclass(frozen=True)
class Siblings:
    """All trial answers of a data set, as numbers of distinct answers; samples of one problem follow each other.

    trial: [samples, places], at the multiples of `interval`; a sample that has ended keeps its final answer. asked:
    number of trial answers. tokens, asked, final, gold: [samples]. Answers that could not be read are negative.
    """

    interval: int
    trial: NDArray[np.int64]
    tokens: NDArray[np.int64]
    asked: NDArray[np.int64]
    final: NDArray[np.int64]
    gold: NDArray[np.int64]
    problem: NDArray[np.int64]


@dataclass(frozen=True)
class Recording:
    """Recorded thinking of one task."""

    name: str
    replay: Replay
    siblings: Siblings | None = None


def own(trace: Path, labels: Path) -> Recording:
    """Read a trace and its labels, as calibration reads them. Raises FileError."""
    episodes = collect([trace])
    policy = forms.from_older_proto(episodes.policy)[0] if episodes.policy is not None else Policy()
    return Recording(trace.stem, Replay(episodes, from_labels(labels, episodes), policy, delay_tokens=2))


def public(path: Path) -> Recording:
    """Read a file of the public set. Raises BenchError if the file does not have the set's form."""
    try:
        siblings = _siblings(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchError(f"{path}: is not a file of {PUBLIC}: {type(error).__name__}: {error}") from error
    return Recording(path.stem, _replay(siblings), siblings)


def _siblings(problems: Sequence[dict[str, Any]]) -> Siblings:
    """Return a file's answers as numbers."""
    numbers: dict[str, int] = {}

    def number(answer: str) -> int:
        return -1 if answer == UNREADABLE else numbers.setdefault(str(answer), len(numbers))

    samples = [(i, p["gold_answer"], *branch) for i, p in enumerate(problems) for branch in p["each_branch"]]
    (interval,) = {int(p.get("probe_freq", INTERVAL_TOKENS)) for p in problems}
    tokens = np.array([total for _, _, _, total, _ in samples], np.int64)
    width = int(tokens.max() - 1) // interval
    trial, asked = np.full((len(samples), width), -1, np.int64), np.zeros(len(samples), np.int64)
    for row, (_, _, trials, total, final) in enumerate(samples):
        # Some samples have a few answers more or fewer than their tokens tell. For siblings the last answer stands for
        # missing ones; no rule is asked there.
        until = (int(total) - 1) // interval
        found = [number(answer) for answer in trials[:until]]
        asked[row] = len(found)
        trial[row, : len(found)] = found
        trial[row, len(found) : until] = found[-1] if found else -1
        trial[row, until:] = number(final)
    gold = np.array([number(right) for _, right, *_ in samples], np.int64)
    final_answers = np.array([number(final) for *_, final in samples], np.int64)
    of = np.array([problem for problem, *_ in samples], np.int64)
    return Siblings(interval, trial, tokens, asked, final_answers, gold, of)


def _replay(siblings: Siblings) -> Replay:
    """Return the samples as requests whose trial answers are probes at sentence ends; nothing else was measured."""
    trial, width = siblings.trial, siblings.trial.shape[1]
    places = siblings.interval * (np.arange(width) + 1)
    thinks = np.arange(width) < siblings.asked[:, None]
    owner, column = np.nonzero(thinks)
    at, count = places[column], len(owner)
    same = np.ones_like(trial)
    for place in range(1, width):
        same[:, place] += np.where(trial[:, place] == trial[:, place - 1], same[:, place - 1], 0)
    nothing, none = np.full(count, np.nan), np.zeros(count, np.int64)
    episodes = Episodes(
        ids=[f"{problem}-{number}" for number, problem in enumerate(siblings.problem.tolist())],
        natural_tokens=siblings.tokens,
        owner=owner,
        think_tokens=at,
        decided_tokens=at,
        paragraph=np.zeros(count, bool),
        ranks=np.zeros((count, RANK_HISTORY), np.int64),
        rank_count=none,
        entropy_nats=nothing,
        entropy_count=none,
        entropy_place=none,
        entropy_running=np.zeros(1),
        sample=np.arange(count),
        sample_owner=owner,
        sample_tokens=at,
        sample_arrived=at,
        eat_nats=nothing,
        cost_tokens=np.full(count, WHOLE_TOKENS),
        margins=np.full((count, CONFIRM_HISTORY), np.nan),
        earlier_counts=np.zeros((count, CONFIRM_HISTORY - 1), np.int64),
        earlier_places=np.zeros((count, CONFIRM_HISTORY - 1), np.int64),
        same_answer=same[thinks],
        empty_answer=trial[thinks] < 0,
        seen=frozenset(),
        left_out={},
        policy=None,
    )
    right = siblings.trial == siblings.gold[:, None]
    natural = (siblings.final == siblings.gold).astype(float)
    groups = tuple(f"problem {problem}" for problem in siblings.problem.tolist())
    judge = Judge(owner, at, right[thinks].astype(float), natural, False, groups)
    return Replay(episodes, judge, Policy(), delay_tokens=1)


def consensus(siblings: Siblings, size: int, times: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return where `size` samples of a problem end each other, and whether the answer is then right, [samples].

    They end once all have had the same answer at `times` places in a row; a sample that has ended counts with its final
    answer. The end is infinite for a sample that ends by itself. This is no rule of ours, because a session does not
    know which requests ask the same.
    """
    count = len(siblings.tokens) // size * size
    trial = siblings.trial[:count].reshape(-1, size, siblings.trial.shape[1])
    agree = (trial == trial[:, :1]).all(axis=1) & (trial[:, 0] >= 0)
    run = agree.astype(np.int64)
    for place in range(1, run.shape[1]):
        stays = agree[:, place] & agree[:, place - 1] & (trial[:, 0, place] == trial[:, 0, place - 1])
        run[:, place] += np.where(stays, run[:, place - 1], 0)
    fires = run >= times
    first = np.where(fires.any(axis=1), fires.argmax(axis=1), -1)
    answer = trial[np.arange(len(trial)), 0, first]
    at = np.where(first >= 0, siblings.interval * (first + 1.0), np.inf).repeat(size)
    natural = (siblings.final == siblings.gold).astype(float)
    right = natural.copy()
    stopped = np.full(len(natural), np.inf)
    cut = at < siblings.tokens[:count]
    stopped[:count][cut] = at[cut]
    right[:count][cut] = (answer.repeat(size) == siblings.gold[:count])[cut]
    return stopped, right
