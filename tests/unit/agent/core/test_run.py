"""Steps that the tracker notes as a whole give the same results as steps that it notes request by request."""

from __future__ import annotations

import random
from typing import Any

import pytest

from meridian_agent.core.live_request import Cap, Ending, LiveRequest
from meridian_agent.core.phases import Markers
from meridian_agent.core.request_info import RequestInfo
from meridian_agent.core.tracker import Tracker
from meridian_agent.link.messages import step_report

START, END, TEXT, STOP = 1, 2, 3, 4
MARKERS = Markers(((START,),), ((END,),))
# The token STOP ends a sentence.
BOUNDARIES = bytes([0, 0, 0, 0, 32])


def tracker_of(markers: Markers = MARKERS) -> Tracker:
    tracker = Tracker(markers)
    tracker.boundaries = BOUNDARIES
    return tracker


def opened(tracker: Tracker, name: str, prompt: list[int] | None = None, own_cap: int | None = None) -> LiveRequest:
    info = RequestInfo(name, "", "", "", 0, 0, own_cap)
    return tracker.open(info, [START] if prompt is None else prompt, 0, object())


def step(tracker: Tracker, tokens: dict[str, list[int]]) -> bool:
    """Account a step as the agent does, and return whether it was noted as a whole."""
    if tracker.note(list(tokens), list(tokens.values())):
        return True
    for row, (name, new) in enumerate(tokens.items()):
        if new:
            tracker.feed(tracker.by_id[name], new, row)
    tracker.noted_singly(list(tokens))
    return False


def noted(tracker: Tracker, tokens: dict[str, list[int]], steps: int = 3) -> list[bool]:
    return [step(tracker, tokens) for _ in range(steps)]


def test_a_run_begins_once_a_batch_has_stayed_the_same() -> None:
    tracker = tracker_of()
    for name in "ab":
        opened(tracker, name)
    batch = {"a": [TEXT], "b": [TEXT]}
    assert noted(tracker, batch) == [False, False, True]
    assert noted(tracker, {"b": [TEXT], "a": [TEXT]}) == [False, False, True]
    opened(tracker, "c")
    assert noted(tracker, {**batch, "c": [TEXT]}) == [False, False, True]
    tracker.close(tracker.by_id["c"], 1)
    assert noted(tracker, batch) == [False, False, True]


@pytest.mark.parametrize("tokens", [[END], [START], [TEXT, TEXT], []])
def test_what_is_not_one_token_of_text_is_looked_at(tokens: list[int]) -> None:
    tracker = tracker_of()
    for name in "ab":
        opened(tracker, name)
    assert noted(tracker, {"a": [TEXT], "b": [TEXT]})[-1]
    assert not step(tracker, {"a": [TEXT], "b": tokens})


def test_a_run_stops_before_a_cap_is_looked_at() -> None:
    for lookahead in (0, 1):
        tracker = tracker_of()
        tracker.lookahead = lookahead
        a = opened(tracker, "a", own_cap=8)
        seen = []
        for _ in range(8):
            step(tracker, {"a": [TEXT]})
            seen.append(a in tracker.due)
        assert seen == [count >= 8 - lookahead for count in range(1, 9)]
        assert a.state.think_tokens == 8


def test_a_cap_in_shadow_is_looked_at_when_it_is_reached() -> None:
    tracker = tracker_of()
    a = opened(tracker, "a")
    a.cap = Cap(1, 6, True)
    tracker.watch_limit(a)
    assert noted(tracker, {"a": [TEXT]}, 7) == [False, False, True, True, True, False, False]
    a.cap.reported = True
    assert step(tracker, {"a": [TEXT]}) is False
    assert step(tracker, {"a": [TEXT]}) is True


def test_what_needs_a_look_at_each_step_is_no_run() -> None:
    tracker = tracker_of()
    a = opened(tracker, "a")
    assert noted(tracker, {"a": [TEXT]})[-1]
    tracker.preempted[a] = None
    assert noted(tracker, {"a": [TEXT]}) == [False] * 3
    tracker.preempted.clear()
    assert noted(tracker, {"a": [TEXT]})[-1]
    a.ending = Ending((END,), 1)
    tracker.due[a] = None
    assert noted(tracker, {"a": [TEXT]}) == [False] * 3
    several = tracker_of(Markers(((START,),), ((5, 6),)))
    opened(several, "a")
    assert noted(several, {"a": [TEXT]}) == [False] * 3


def test_whoever_looks_sees_the_newest_step() -> None:
    tracker = tracker_of()
    a, b = opened(tracker, "a"), opened(tracker, "b", [START, END])
    assert noted(tracker, {"a": [TEXT], "b": [STOP]}, 5)[-1]
    assert step(tracker, {"a": [STOP], "b": [STOP]})
    assert (a.boundary, b.boundary) == (32, 0)
    assert (a.state.think_tokens, a.state.text_run, b.state.output_tokens) == (6, 6, 6)
    assert step(tracker, {"a": [TEXT], "b": [STOP]})
    assert [(row[3], row[4]) for row in tracker.snapshot()] == [(7, 0), (0, 7)]
    assert a.boundary == 0


def test_reports_do_not_tell_how_a_step_was_accounted() -> None:
    tokens = {"a": [STOP], "b": [STOP], "c": [99]}
    reports = []
    for whole in (False, True):
        tracker = tracker_of()
        for name, prompt in (("a", [START]), ("b", [START, END]), ("c", [START])):
            opened(tracker, name, prompt)
        for _ in range(2):
            step(tracker, tokens)
            tracker.take_record()
        if not whole:
            tracker.run.end()
        assert step(tracker, tokens) is whole
        reports.append(step_report([tracker.take_record()]).SerializeToString(deterministic=True))
    assert reports[0] == reports[1]
    assert tracker.record.text == (), "the tracker's next record begins empty"


def state(live: LiveRequest) -> tuple[Any, ...]:
    s = live.state
    return live.info.request_id, s.phase, s.think_tokens, s.output_tokens, s.text_run, live.boundary


@pytest.mark.parametrize("seed", range(12))
def test_noted_as_a_whole_or_one_by_one(seed: int) -> None:
    """The same workload is noted in both ways, and no reader can tell the two apart at any time."""
    rng = random.Random(seed)
    whole, singly = tracker_of(), tracker_of()
    count, as_a_whole = 0, 0
    for _ in range(200):
        chance = rng.random()
        names = list(whole.by_id)
        if chance < 0.05 and len(names) < 6:
            prompt, cap = rng.choice(([START], [START, END], [])), rng.choice((None, None, None, 30))
            for tracker in (whole, singly):
                opened(tracker, str(count), prompt, cap)
            count += 1
        elif chance < 0.07 and names:
            name = rng.choice(names)
            for tracker in (whole, singly):
                tracker.close(tracker.by_id[name], 1)
        elif names:
            joins = names if rng.random() < 0.95 else names[:-1]
            tokens = {name: [rng.choices((TEXT, STOP, START, END), (80, 20, 1, 2))[0]] for name in joins}
            as_a_whole += step(whole, tokens)
            singly.run.end()
            step(singly, tokens)
            singly.run.end()
        assert {t.info.request_id for t in whole.due} == {t.info.request_id for t in singly.due}
        assert (whole.thinking, whole.answering) == (singly.thinking, singly.answering)
        if rng.random() < 0.1:
            assert [state(t) for t in whole.by_id.values()] == [state(t) for t in singly.by_id.values()]
        reports = [step_report([t.take_record()]).SerializeToString(deterministic=True) for t in (whole, singly)]
        assert reports[0] == reports[1]
    assert [state(t) for t in whole.by_id.values()] == [state(t) for t in singly.by_id.values()]
    assert as_a_whole > 5
