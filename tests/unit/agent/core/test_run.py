"""Steps that the tracker counts as a whole for most requests give the same results as steps that it counts request by
request."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from meridian_agent.core.step_signals import StepSignals
from meridian_agent.core.tracker import Tracker
from meridian_agent.link.messages import step_report
from tests.fakes.engine import END, MARKERS, START, TEXT, opened
from tests.fakes.records import in_slot_order
from tests.fakes.sentences import ends_by_id

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meridian_agent.core.live_request import LiveRequest
    from meridian_agent.core.phases import Markers

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
@pytest.mark.parametrize("seed", range(3))
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
