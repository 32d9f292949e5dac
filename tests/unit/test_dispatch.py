"""Order and share: each policy field's effect, and only changes are told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meridian_control.dispatch import RELEASE, Share, changed_ranks, share
from meridian_control.policy import SchedulerPolicy
from meridian_control.requests import OUTPUT, PROMPT, THINK
from tests.fakes.tables import answering, table, thinking

POLICY = SchedulerPolicy()


def test_answers_first_thinking_last() -> None:
    made = table({"phase": 0}, {"phase": PROMPT}, thinking(), answering())
    slots, ranks = changed_ranks(made)
    assert (slots.tolist(), ranks.tolist()) == ([0, 1, 2, 3], [1, 1, 2, 0])


def test_only_changes_are_told() -> None:
    made = table(thinking(), answering(), thinking())
    changed_ranks(made)
    assert changed_ranks(made)[0].tolist() == []
    made.phase[2] = OUTPUT
    made.phase[1] = THINK
    made.close(1)
    slots, ranks = changed_ranks(made)
    assert (slots.tolist(), ranks.tolist()) == ([2], [0])


def test_thinking_is_limited_once_steps_exceed_the_answers_budget() -> None:
    made = table(answering(), answering(), *[thinking()] * 6)
    assert share(POLICY, made, 20.0, limited=False) == Share()
    assert share(POLICY, made, 20.1, limited=False) == Share(think_per_step=5, max_skip_steps=2)


@pytest.mark.parametrize(
    ("fields", "step_time_ms", "expected"),
    [
        ({"output_tpot_budget_ms": 30.0}, 20.1, Share()),
        ({"output_tpot_budget_ms": 10.0}, 20.0, Share(5, 3)),
        ({"think_batch_multiplier": 3.0}, 20.1, Share()),
        ({"think_batch_multiplier": 1.0}, 20.1, Share(2, 2)),
        ({"think_batch_multiplier": 0.1}, 20.1, Share(1, 2)),
        ({"think_tpot_budget_ms": 200.0}, 20.1, Share(5, 8)),
        ({"think_tpot_budget_ms": 20.0}, 20.1, Share(5, 0)),
    ],
)
def test_each_field_has_an_effect(fields: dict[str, float], step_time_ms: float, expected: Share) -> None:
    made = table(answering(), answering(), *[thinking()] * 6)
    assert share(SchedulerPolicy(**fields), made, step_time_ms, limited=False) == expected  # type: ignore[arg-type]


def test_a_limit_is_released_only_well_below_the_budget() -> None:
    made = table(answering(), *[thinking()] * 6)
    below = POLICY.output_tpot_budget_ms * RELEASE
    assert share(POLICY, made, below + 0.1, limited=True).think_per_step == 3
    assert share(POLICY, made, below + 0.1, limited=False) == Share()
    assert share(POLICY, made, below, limited=True) == Share()


def test_no_answer_no_limit() -> None:
    assert share(POLICY, table(*[thinking()] * 6), 99.0, limited=True) == Share()
    waiting = answering(preempted=True)
    assert share(POLICY, table(waiting, *[thinking()] * 6), 99.0, limited=True) == Share()
    assert share(POLICY, table(answering(live=False), *[thinking()] * 6), 99.0, limited=True) == Share()


@given(st.integers(1, 20), st.integers(0, 60), st.floats(20.5, 500), st.floats(0.01, 10), st.floats(1, 1000))
def test_a_thinking_sequence_is_never_without_a_token_longer_than_its_budget(
    answers: int, thinkers: int, step_time_ms: float, multiplier: float, budget_ms: float
) -> None:
    fields = SchedulerPolicy(think_batch_multiplier=multiplier, think_tpot_budget_ms=budget_ms)
    found = share(fields, table(*[answering()] * answers, *[thinking()] * thinkers), step_time_ms, limited=False)
    if found.think_per_step is None:
        assert thinkers <= multiplier * answers + 1
        assert found.max_skip_steps == 0
        return
    assert 1 <= found.think_per_step < thinkers
    assert found.think_per_step >= multiplier * answers
    # Left out so many times in a row and then joined, or never left out at all.
    longest_ms = (found.max_skip_steps + 1) * step_time_ms
    assert longest_ms <= budget_ms * (1 + 1e-9) or found.max_skip_steps == 0
