"""Judges whether the answer is right if thinking ends at a place: by users' labels, or by the probes' trial answers.

The module owns the label file's format and the proxy for labels. The module knows no rule.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from meridian_control.capabilities.control_group.requests import answers_alike
from meridian_control.common.errors import MeridianError
from meridian_control.common.look import percent
from meridian_control.journal.request_ids import shortened, without_choice
from meridian_control.offline.episodes import KEY
from meridian_control.offline.trace_file import FileError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from meridian_control.offline.episodes import Episodes

LABEL_KEYS = {"request_id", "think_tokens", "correct", "group"}
# Smallest probability of a right answer that counts as right, in counts of right and wrong answers.
RIGHT = 0.5
# The place of the label of a natural end, and the number for an id that names several requests.
NATURAL, SHARED = -1, -2


@dataclass(frozen=True)
class Judge:
    """The probability of a right answer after a number of thinking tokens, at the places where it is known.

    Places are sorted by request, then by thinking tokens. `natural` is the probability after all of the thinking; NaN
    for a request that cannot be judged. `groups` names the group of each request, for example the problem that it asks
    about; empty if the requests are independent. Without groups of labels, the choices of one prompt are a group.
    `strangers`: labelled requests that are not in the traces. `shared`: labelled ids that name several requests there.
    """

    owner: NDArray[np.int64]
    think_tokens: NDArray[np.int64]
    right: NDArray[np.float64]
    natural: NDArray[np.float64]
    is_proxy: bool
    groups: tuple[str, ...] = ()
    strangers: int = 0
    shared: int = 0

    def right_at(self, owner: NDArray[np.int64], think_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the probability at the nearest known place at or after each given place, else that of `natural`."""
        keys = self.owner * KEY + self.think_tokens
        index = np.searchsorted(keys, owner * KEY + think_tokens)
        within = index < len(keys)
        within[within] = self.owner[index[within]] == owner[within]
        right = self.natural[owner]
        right[within] = self.right[index[within]]
        return right


def check_once(path: Path, episodes: Episodes) -> None:
    """Raise FileError if a request is in the traces twice: it would count as two, and bounds would be narrower than the
    recordings prove. path: of the newest trace."""
    twice = next((request_id for request_id, count in Counter(episodes.ids).items() if count > 1), None)
    if twice is not None:
        raise FileError(path, "", f"cannot be used: the traces hold several requests with the id {twice!r}")


class AnswersAlikeError(MeridianError):
    """The trial answers do not tell one answer from another."""


def check_answers_differ(episodes: Episodes) -> None:
    """Raise AnswersAlikeError if trial answers of different requests differ too rarely. What an earlier end would
    change is not seen then, so each rule would look harmless."""
    owner = episodes.sample_owner
    newest = np.searchsorted(owner, np.unique(owner), "right") - 1
    known = episodes.other_answer[newest]
    known = known[known >= 0]
    if answers_alike(int(known.sum()), len(known)):
        raise AnswersAlikeError(
            f"only {percent(float(known.mean()))} of the requests have another trial answer than the request before, "
            "so answers begin alike, or few questions are asked again and again, and what an earlier end would change "
            "cannot be seen; set the model's eat_answer_prefix"
        )


def from_probes(episodes: Episodes) -> Judge:
    """Judge by a proxy: a place is right if its trial answer is not empty and no later trial answer differs."""
    owner, same = episodes.sample_owner, episodes.same_answer
    number = np.arange(len(owner))
    end = np.searchsorted(owner, owner, "right")
    last = same[end - 1] if len(owner) else same
    stays = (number >= end - last) & ~episodes.empty_answer
    is_judged = np.bincount(owner[same > 0], minlength=len(episodes.ids)) > 0
    return Judge(
        owner, episodes.sample_tokens, stays.astype(float), np.where(is_judged, 1.0, np.nan), True, _choices(episodes)
    )


def from_labels(path: Path, episodes: Episodes) -> Judge:
    """Judge by the user's labels; several of one place count as their mean. A request without both a natural and a cut
    label cannot be judged.

    Labels of other requests than those in the trace are left out, because a recording may begin after the traffic or
    end before it. Raises FileError with the line of a label that is malformed, or if no label is of a request in the
    trace, or if some of the judged requests have a group and others have none.
    """
    numbers = _numbers(path, episodes)
    natural = np.full(len(episodes.ids), np.nan)
    correct: dict[tuple[int, int], list[float]] = {}
    groups: dict[int, str] = {}
    rows = _rows(path)
    if not rows:
        raise FileError(path, "", "holds no label")
    labelled = {row["request_id"] for _, row in rows}
    strangers = labelled - set(numbers)
    shared = {name for name in labelled if numbers.get(name) == SHARED}
    if strangers | shared == labelled:
        line, row = rows[0]
        why = "names several requests" if row["request_id"] in shared else "is not in the trace, nor is any other"
        raise FileError(path, f"{line}:", f"request_id {row['request_id']!r} {why}")
    for line, row in rows:
        if (request := numbers.get(row["request_id"], -1)) < 0:
            continue
        if (group := row.get("group")) is not None and groups.setdefault(request, group) != group:
            raise FileError(path, f"{line}:", f"group must be {groups[request]!r} as in an earlier line; got {group!r}")
        tokens = row.get("think_tokens")
        correct.setdefault((request, NATURAL if tokens is None else tokens), []).append(float(row["correct"]))
    places = {place: sum(answers) / len(answers) for place, answers in correct.items()}
    for request, tokens in [place for place in places if place[1] == NATURAL]:
        natural[request] = places.pop((request, tokens))
    cut = np.zeros(len(natural), bool)
    cut[[request for request, _ in places]] = True
    natural[~cut] = np.nan
    without = next((number for number in np.flatnonzero(~np.isnan(natural)).tolist() if number not in groups), None)
    if groups and without is not None:
        raise FileError(path, "", f"gives request {episodes.ids[without]!r} no group, but it gives other requests one")
    ordered = sorted(place for place in places if not np.isnan(natural[place[0]]))
    return Judge(
        np.array([request for request, _ in ordered], np.int64),
        np.array([tokens for _, tokens in ordered], np.int64),
        np.array([places[place] for place in ordered], np.float64),
        natural,
        False,
        tuple(groups.get(number, "") for number in range(len(natural))) if groups else _choices(episodes),
        len(strangers),
        len(shared),
    )


def _choices(episodes: Episodes) -> tuple[str, ...]:
    """Return what names the prompt of each request, if several requests are choices of one prompt; empty if not."""
    prompts = tuple(map(without_choice, episodes.ids))
    return prompts if len(set(prompts)) < len(prompts) else ()


def _numbers(path: Path, episodes: Episodes) -> dict[str, int]:
    """Return request numbers by id, and by id without vLLM's additions; -1 for requests that cannot be used, and SHARED
    for an id without additions that several requests have."""
    exact = dict.fromkeys(episodes.seen, -1) | {request_id: number for number, request_id in enumerate(episodes.ids)}
    uses = Counter(name for request_id in exact for name in shortened(request_id))
    short = {name: number for request_id, number in exact.items() for name in shortened(request_id)}
    return {name: number if uses[name] == 1 else SHARED for name, number in short.items()} | exact


def _rows(path: Path) -> list[tuple[int, dict[str, Any]]]:
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise FileError(path, "", f"cannot be read: {reason}") from error
    rows = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise FileError(path, f"{number}:", f"is not JSON: {error}") from error
            if complaint := _complaint(row):
                raise FileError(path, f"{number}:", complaint)
            rows.append((number, row))
    return rows


def _complaint(row: Any) -> str:
    if not isinstance(row, dict):
        return "must be an object"
    request_id, tokens, correct, group = (row.get(key) for key in ("request_id", "think_tokens", "correct", "group"))
    obstacles = (
        (bool(set(row) - LABEL_KEYS), f"{sorted(set(row) - LABEL_KEYS)} are not known keys"),
        (not isinstance(request_id, str) or not request_id, f"request_id must be a string; got {request_id!r}"),
        (
            tokens is not None and (type(tokens) is not int or not 0 <= tokens < KEY),
            f"think_tokens must be an integer >= 0; got {tokens!r}",
        ),
        (
            not isinstance(correct, bool | int | float) or not 0 <= correct <= 1,
            f"correct must be true, false or in [0, 1]; got {correct!r}",
        ),
        (
            group is not None and (not isinstance(group, str) or not group),
            f"group must be a string that is not empty; got {group!r}",
        ),
    )
    return next((complaint for holds, complaint in obstacles if holds), "")
