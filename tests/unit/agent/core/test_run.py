"""Steps that the tracker counts as a whole for most requests give the same results as steps that it counts request by
request."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from meridian_agent.core.live_request import Cap, Ending, LiveRequest
from meridian_agent.core.phases import Markers
from meridian_agent.core.step_signals import StepSignals
from meridian_agent.core.tracker import Tracker
from meridian_agent.link.messages import step_report
from tests.fakes.engine import END, MARKERS, START, TEXT, opened
from tests.fakes.records import in_slot_order
from tests.fakes.sentences import ends_by_id

# A token that ends a sentence.
STOP = 4


def tracker_of(markers: Markers = MARKERS, drafts: int = 0) -> Tracker:
    tracker = Tracker(markers, 1 + drafts)
    tracker.lookahead = drafts
    tracker.sentences = ends_by_id(bytes([0, 0, 0, 0, 32]))
    return tracker


def step(tracker: Tracker, tokens: dict[str, list[int]], ended: Iterable[str] = ()) -> str:
    """Account a step as the agent does; return the ids that were looked at one by one. ended: ids of requests that end
    in the step."""
    names, told, rows = list(tokens), None, [*range(len(tokens))]
    run, enders = tracker.run, tracker.markers.by_last.keys()
    if run.tokens_per_step > 1:
        # The signals' entropies are the numbers of their rows.
        rows = [row * run.tokens_per_step for row in rows]
        entropies = np.arange(len(rows) * run.tokens_per_step, dtype=np.float32)
        ranks, first = entropies.astype(np.int32), np.array(rows, np.int32)
        told = StepSignals(first, entropies, ranks, entropies, entropies).encode()
    if not ended and (text := run.count_all(names, list(tokens.values()), enders)) is not None:
        columns = run.slots, run.phases, run.rows, text, run.sentences, run.text_states, told, run.lengths_for(told)
        tracker.record.tell((0, 0, 0, 0, 0, *columns))
        return ""
    others = tracker.note(names, list(tokens.values()), ended)
    tracker.record.told = told
    tracker.count(others, told)
    for row in others:
        if (live := tracker.by_id.get(names[row])) and tokens[names[row]]:
            tracker.feed(live, tokens[names[row]], rows[row])
    for name in ended:
        tracker.close(tracker.by_id[name], 1)
    tracker.looked_at(others)
    return "".join(names[row][-1] for row in others)


def stepped(tracker: Tracker, tokens: dict[str, list[int]], steps: int = 3) -> list[str]:
    return [step(tracker, tokens) for _ in range(steps)]


def test_a_request_joins_after_its_first_step() -> None:
    tracker = tracker_of()
    for name in "ab":
        opened(tracker, name)
    batch = {"a": [TEXT], "b": [TEXT]}
    assert stepped(tracker, batch) == ["ab", "", ""]
    assert stepped(tracker, {"b": [TEXT], "a": [TEXT]}) == ["", "", ""], "only the rows have changed"
    opened(tracker, "c")
    assert stepped(tracker, {**batch, "c": [TEXT]}) == ["c", "", ""]
    assert step(tracker, {**batch, "c": [TEXT]}, ended="b") == "b"
    assert stepped(tracker, {"a": [TEXT], "c": [TEXT]}) == ["", "", ""]
    assert [live.state.think_tokens for live in tracker.by_id.values()] == [13, 7]


def test_the_step_after_a_request_joined_is_counted_as_a_whole() -> None:
    tracker, text = tracker_of(), [[TEXT], [TEXT]]
    for name in "ab":
        opened(tracker, name)
    stepped(tracker, {"a": [TEXT]}, 2)
    assert tracker.run.count_all(["a", "b"], text, {START, END}) is None, "a request is not a member yet"
    assert step(tracker, {"a": [TEXT], "b": [TEXT]}) == "b"
    assert tracker.run.count_all(["a", "b"], text, {START, END}) == [TEXT, TEXT]
    assert (tracker.run.rows, tracker.run.slots) == ([0, 1], [0, 1]), "the columns have the new member"


def test_a_request_that_a_step_leaves_out_joins_again() -> None:
    tracker = tracker_of()
    a, b = (opened(tracker, name) for name in "ab")
    stepped(tracker, {"a": [TEXT], "b": [STOP]})
    assert step(tracker, {"a": [TEXT]}) == ""
    assert (a.state.think_tokens, b.state.think_tokens, b.sentence_flags & 32) == (4, 3, 32)
    assert stepped(tracker, {"b": [TEXT], "a": [TEXT]}) == ["b", "", ""]
    assert (a.state.think_tokens, b.state.think_tokens) == (7, 6)


def test_a_limit_concerns_the_run_only_while_its_request_thinks_and_is_near_it() -> None:
    tracker = tracker_of()
    a, b = opened(tracker, "a", prompt=[TEXT]), opened(tracker, "b")
    batch = {"a": [TEXT], "b": [TEXT]}
    stepped(tracker, batch)
    number = tracker.run.number
    a.set_cap(Cap(1, 2, False))
    tracker.watch_limit(a)
    assert tracker.run.number == number, "the request answers"
    assert step(tracker, {**batch, "a": [START]}) == "a"
    assert stepped(tracker, batch) == ["", "a", "a"], "it thinks, and comes near its cap"
    assert list(tracker.due) == [a]
    number = tracker.run.number
    b.set_cap(Cap(2, 100, False))
    tracker.watch_limit(b)
    assert tracker.run.number == number, "its cap is far"
    cap = b.think_tokens + 3
    b.set_cap(Cap(3, cap, False))
    tracker.watch_limit(b)
    assert tracker.run.number == number, "its cap is nearer"
    assert [step(tracker, {"b": [TEXT]}) for _ in range(3)] == ["", "", "b"]
    assert b in tracker.due
    assert b.state.think_tokens == cap
    c = opened(tracker, "c")
    assert step(tracker, {"c": [TEXT]}) == "c"
    number = tracker.run.number
    c.set_cap(Cap(4, c.think_tokens + 1, False))
    tracker.watch_limit(c)
    assert tracker.run.number != number, "its cap comes with the next token"


def test_the_number_changes_with_the_members_and_the_live_requests() -> None:
    tracker, numbers = tracker_of(), []
    a, b = (opened(tracker, name) for name in "ab")
    stepped(tracker, {"a": [TEXT], "b": [TEXT]})
    changes: list[Callable[[], object]] = [
        lambda: tracker.run.leave(b),
        lambda: step(tracker, {"a": [TEXT], "b": [TEXT]}),
        lambda: step(tracker, {"b": [TEXT], "a": [TEXT]}),
        lambda: opened(tracker, "c"),
        lambda: tracker.close(tracker.by_id["c"], 1),
        lambda: tracker.preempt(a),
    ]
    for change in changes:
        numbers.append(tracker.run.number)
        change()
    assert len({*numbers, tracker.run.number}) == len(changes) + 1
    assert (tracker.run.members, tracker.run.whole) == (1, False)
    before = tracker.run.number
    assert (step(tracker, {"b": [TEXT]}), tracker.run.whole) == ("", True)
    assert stepped(tracker, {"b": [TEXT]}) == ["", "", ""]
    assert tracker.run.number == before + 1, "the preempted request's row has gone"


@pytest.mark.parametrize("tokens", [[END], [START], [TEXT, TEXT], []])
def test_what_is_not_one_token_of_text_is_looked_at(tokens: list[int]) -> None:
    tracker = tracker_of()
    for name in "ab":
        opened(tracker, name)
    assert not stepped(tracker, {"a": [TEXT], "b": [TEXT]})[-1]
    assert step(tracker, {"a": [TEXT], "b": tokens}) == "b"
    assert list(tracker.record.text) == [TEXT]
    assert tracker.record.slots == [0] + [1] * len(tokens)


def test_a_request_leaves_before_its_cap_is_looked_at() -> None:
    for lookahead in (0, 1):
        tracker = tracker_of()
        tracker.lookahead = lookahead
        a, b = opened(tracker, "a", own_cap=8), opened(tracker, "b")
        seen, looked_at = [], []
        for _ in range(8):
            looked_at.append(step(tracker, {"a": [TEXT], "b": [TEXT]}))
            seen.append(a in tracker.due)
        assert seen == [count >= 8 - lookahead for count in range(1, 9)]
        assert looked_at == ["ab", *[""] * (6 - lookahead), *["a"] * (1 + lookahead)]
        assert (a.state.think_tokens, b.state.think_tokens) == (8, 8)


def test_a_cap_in_shadow_is_looked_at_when_it_is_reached() -> None:
    tracker = tracker_of()
    a = opened(tracker, "a")
    a.cap = Cap(1, 6, True)
    tracker.watch_limit(a)
    assert stepped(tracker, {"a": [TEXT]}, 7) == ["a", "", "", "", "", "a", "a"]
    a.cap.reported = True
    assert step(tracker, {"a": [TEXT]}) == "a"
    assert step(tracker, {"a": [TEXT]}) == ""


def test_what_needs_a_look_at_each_step_is_no_member() -> None:
    tracker = tracker_of()
    a = opened(tracker, "a")
    assert not stepped(tracker, {"a": [TEXT]})[-1]
    tracker.preempt(a)
    assert stepped(tracker, {"a": [TEXT]}) == ["a"] * 3
    tracker.resume(a)
    assert not stepped(tracker, {"a": [TEXT]})[-1]
    tracker.run.leave(a)
    a.ending = Ending((END,), 1)
    tracker.due[a] = None
    assert stepped(tracker, {"a": [TEXT]}) == ["a"] * 3
    several = tracker_of(Markers(((START,),), ((5, 6),)))
    opened(several, "a")
    assert stepped(several, {"a": [TEXT]}) == ["a"] * 3


def state(live: LiveRequest) -> tuple[Any, ...]:
    boundary, since = live.sentence_flags & 32, live.since_end(32, 2)
    s = live.state
    return live.info.request_id, s.phase, s.think_tokens, s.output_tokens, s.text_run, boundary, since


def drawn(rng: random.Random, names: list[str], drafts: int) -> dict[str, list[int]]:
    """Draw the new tokens of each request."""
    draw = rng.choices((TEXT, STOP, START, END), (80, 20, 1, 2), k=len(names))
    tokens = {name: [token] for name, token in zip(names, draw, strict=True)}
    if drafts and rng.random() < 0.7:
        more = {name: rng.choices((TEXT, STOP, START, END), (80, 20, 1, 1), k=drafts) for name in names}
        tokens = {name: [*new, *more[name][: rng.randint(0, drafts)]] for name, new in tokens.items()}
    if names and rng.random() < 0.03:
        tokens[rng.choice(names)] = rng.choice(([], [TEXT, STOP]))
    return tokens


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("seed", range(6))
def test_counted_as_a_whole_or_one_by_one(seed: int, drafts: int) -> None:
    """The same workload is counted in both ways, and no reader can tell the two apart at any time."""
    rng = random.Random(seed)
    whole, singly = tracker_of(drafts=drafts), tracker_of(drafts=drafts)
    count, looked_at, rows_in_all = 0, 0, 0
    for _ in range(300):
        chance = rng.random()
        # The runner moves the last row into a row that has become free.
        names = [name for name in whole.run.request_ids if name in whole.by_id]
        names += [name for name in whole.by_id if name not in names]
        if chance < 0.05 and len(names) < 6:
            prompt, cap = rng.choice(([START], [START, END], [])), rng.choice((None, None, None, 30))
            for tracker in (whole, singly):
                opened(tracker, str(count), prompt, cap)
            count += 1
        elif chance < 0.06 and names:
            name = rng.choice(names)
            for tracker in (whole, singly):
                tracker.close(tracker.by_id[name], 1)
        elif chance < 0.1 and names:
            name = rng.choice(names)
            for tracker in (whole, singly):
                if chance < 0.08:
                    tracker.watch_limit(tracker.by_id[name])
                tracker.by_id[name].probed_at = tracker.by_id[name].think_tokens
        elif names:
            if chance < 0.12:
                rng.shuffle(names)
            elif chance < 0.16:
                names = names[:-1]
            tokens = drawn(rng, names, drafts)
            ended = [rng.choice(names)] if 0.16 < chance < 0.2 else []
            looked_at += len(step(whole, tokens, ended))
            rows_in_all += len(tokens)
            step(singly, tokens, ended)
            singly.run.end()
        assert {t.info.request_id for t in whole.due} == {t.info.request_id for t in singly.due}
        assert (whole.thinking, whole.answering) == (singly.thinking, singly.answering)
        if rng.random() < 0.1 or 0.08 < chance < 0.1:
            assert [state(t) for t in whole.by_id.values()] == [state(t) for t in singly.by_id.values()]
        reports = [step_report([in_slot_order(t.take_record())]) for t in (whole, singly)]
        assert reports[0] == reports[1]
    assert [state(t) for t in whole.by_id.values()] == [state(t) for t in singly.by_id.values()]
    assert rows_in_all > 50
    assert looked_at < rows_in_all / 2
