"""Whether an answer would have been right: labels, and the proxy without labels."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from meridian_control.offline.correctness import (
    AnswersAlikeError,
    Judge,
    check_answers_differ,
    from_labels,
    from_probes,
)
from meridian_control.offline.episodes import Episodes
from meridian_control.offline.trace_file import FileError
from tests.fakes import traces
from tests.fakes.replays import made, recorded_in


def test_labels_are_looked_up_where_a_stop_takes_effect() -> None:
    judge = Judge(np.array([0, 0, 1]), np.array([10, 20, 5]), np.array([0.0, 1.0, 0.5]), np.array([1.0, 0.25]), False)
    owner, tokens = np.array([0, 0, 0, 0, 1, 1]), np.array([1, 10, 11, 21, 5, 6])
    assert judge.right_at(owner, tokens).tolist() == [0, 0, 1, 1, 0.5, 0.25]


def test_the_proxy_is_the_last_unbroken_run(tmp_path: Path) -> None:
    requests = made(30)
    episodes = recorded_in(tmp_path, requests)
    judge = from_probes(episodes)
    settled = {request.request_id: request.settled_tokens for request in requests}
    for number, request_id in enumerate(episodes.ids):
        here = judge.owner == number
        right = judge.think_tokens[here] >= settled[request_id]
        # By chance the run of right answers may begin a little before the request settled; it never begins later.
        assert (judge.right[here][right] == 1).all()
        assert judge.right[here].sum() < here.sum()


@pytest.mark.parametrize(
    ("others", "why"),
    [
        ([-1] * 100, ""),
        ([0] * 19, ""),
        ([0] * 20, "only 0.0 % of the requests"),
        ([0] * 85 + [1] * 15, ""),
        ([0] * 86 + [1] * 14, "only 14.0 % of the requests"),
        ([0] * 20 + [-1] * 900, "only 0.0 % of the requests"),
    ],
    ids=["not known", "too few", "alike", "differ", "nearly alike", "known of some"],
)
def test_trial_answers_that_do_not_tell_answers_apart(tmp_path: Path, others: list[int], why: str) -> None:
    """Each request has two samples, of which the newest counts."""
    owner, known = np.repeat(np.arange(len(others)), 2), np.repeat(others, 2)
    known[::2] = 1
    episodes = replace(recorded_in(tmp_path, made(3)), sample_owner=owner, other_answer=known)
    with pytest.raises(AnswersAlikeError, match=why) if why else nullcontext():
        check_answers_differ(episodes)


def labelled(folder: Path, requests: list[traces.MadeUp]) -> tuple[Path, Episodes]:
    """Return a file with labels of all requests, and what is read from their recording."""
    return traces.write_labels(folder / "labels.jsonl", requests), recorded_in(folder, requests)


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("{", "is not JSON: "),
        ("[" * 100_000, "is not JSON: "),
        ("[]", "must be an object"),
        ('{"request_id": 7, "correct": true}', "request_id must be a string; got 7"),
        ('{"request_id": "x", "correct": "yes"}', "correct must be true, false or in [0, 1]; got 'yes'"),
        ('{"request_id": "x", "correct": 1.5}', "correct must be true, false or in [0, 1]; got 1.5"),
        ('{"request_id": "x", "correct": NaN}', "correct must be true, false or in [0, 1]; got nan"),
        ('{"request_id": "x", "correct": 1, "think_tokens": -1}', "think_tokens must be an integer >= 0; got -1"),
        ('{"request_id": "x", "correct": 1, "tokens": 1}', "['tokens'] are not known keys"),
    ],
)
def test_labels_that_cannot_be_used(tmp_path: Path, row: str, complaint: str) -> None:
    path, episodes = labelled(tmp_path, made(3))
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "", row, *lines[1:]]))
    with pytest.raises(FileError) as raised:
        from_labels(path, episodes)
    assert str(raised.value).startswith(f"{path}:3: {complaint}")


def test_labels_of_requests_that_were_not_recorded_are_left_out(tmp_path: Path) -> None:
    path, episodes = labelled(tmp_path, made(3))
    before, foreign = from_labels(path, episodes), '{"request_id": "nobody", "correct": true}'
    path.write_text(f"{foreign}\n{path.read_text()}\n{foreign}")
    after = from_labels(path, episodes)
    assert (before.strangers, after.strangers) == (0, 1)
    assert (after.right == before.right).all()
    path.write_text(f"\n{foreign}")
    with pytest.raises(FileError, match="2: request_id 'nobody' is not in the trace, nor is any other"):
        from_labels(path, episodes)


def test_labels_of_an_id_that_several_requests_have_are_counted(tmp_path: Path) -> None:
    requests = made(3)
    for number, request in enumerate(requests[:2]):
        request.request_id = f"{number}_chatcmpl-mine"
    path, episodes = labelled(tmp_path, requests)
    row = json.dumps({"request_id": "mine", "correct": True})
    path.write_text(f"{path.read_text()}\n{row}")
    judge = from_labels(path, episodes)
    assert (judge.strangers, judge.shared) == (0, 1)
    path.write_text(row)
    with pytest.raises(FileError, match="1: request_id 'mine' names several requests"):
        from_labels(path, episodes)


def test_several_answers_at_one_place_count_as_their_mean(tmp_path: Path) -> None:
    (request,) = requests = made(1)
    episodes, path = recorded_in(tmp_path, requests), tmp_path / "labels.jsonl"
    answers = [(None, 1), (None, 1), (None, 0), (None, 1), (5, 1), (5, 0), (9, 1)]
    rows = [{"request_id": request.request_id, "think_tokens": at, "correct": right} for at, right in answers]
    path.write_text("\n".join(map(json.dumps, rows)))
    judge = from_labels(path, episodes)
    assert (judge.natural.tolist(), judge.think_tokens.tolist(), judge.right.tolist()) == ([0.75], [5, 9], [0.5, 1.0])


def test_a_line_of_labels_ends_with_a_line_feed_alone(tmp_path: Path) -> None:
    """JSON allows other line separators within a string."""
    requests = made(1)
    path, episodes = labelled(tmp_path, requests)
    rows = [row | {"group": "a\u2028b\x85c"} for row in requests[0].labels()]
    path.write_text("\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    assert from_labels(path, episodes).groups == ("a\u2028b\x85c",)


@pytest.mark.parametrize("prefix", ["", "chatcmpl-"])
def test_labels_may_leave_out_what_vllm_adds_to_an_id(tmp_path: Path, prefix: str) -> None:
    requests = made(3)
    for request in requests:
        request.request_id = prefix + request.request_id
    path, episodes = labelled(tmp_path, requests)
    full = from_labels(path, episodes)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["request_id"] = row["request_id"].removeprefix(prefix).rpartition("-")[0]
    path.write_text("\n".join(map(json.dumps, rows)))
    again = from_labels(path, episodes)
    assert (full.right == again.right).all()
    assert (full.natural == again.natural).all()


def test_a_request_with_half_its_labels_is_not_judged(tmp_path: Path) -> None:
    requests = made(3)
    episodes = recorded_in(tmp_path, requests)
    path = tmp_path / "labels.jsonl"
    natural_only = {"request_id": requests[0].request_id, "correct": 1}
    cut_only = {"request_id": requests[1].request_id, "correct": 1, "think_tokens": 5}
    path.write_text("\n".join(json.dumps(row) for row in (natural_only, cut_only, *requests[2].labels())))
    judge = from_labels(path, episodes)
    assert [episodes.ids[n] for n in np.flatnonzero(~np.isnan(judge.natural))] == [requests[2].request_id]
    assert set(judge.owner.tolist()) == {episodes.ids.index(requests[2].request_id)}
