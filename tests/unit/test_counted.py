"""What sessions count for the metrics alone."""

from __future__ import annotations

import pytest

from meridian_control.session import Totals
from tests.fakes.tables import policy
from tests.unit.test_session import CALIBRATED, EARLY, stream


@pytest.mark.parametrize("shadow", [False, True])
def test_outcomes_by_what_was_decided(shadow: bool) -> None:
    made = stream(policy(scheduler=EARLY, entropy=CALIBRATED | {"shadow": shadow}))
    made.agent.eat_nats = 0.01
    made.open("a")
    made.step(20)
    settled = made.session.totals.settled
    assert settled["force/eat", "shadowed" if shadow else "applied"] == 1
    assert settled["probe", "applied"] >= CALIBRATED["eat_warmup_samples"]
    by_outcome = {name: sum(n for (_, outcome), n in settled.items() if outcome == name) for _, name in settled}
    assert by_outcome == made.session.totals.outcomes


def test_thinking_tokens_left_to_the_cap() -> None:
    made = stream(policy(scheduler=EARLY | {"max_think_tokens": 600}, entropy=CALIBRATED))
    slot = made.open("a")
    made.step(20)
    ended = int(made.session.table.think_tokens[slot])
    assert made.session.totals.ends == {"eat": 1}
    assert made.session.totals.below_cap == {"eat": 600 - ended}


def test_nothing_is_left_to_a_cap_that_ended_the_thinking_or_was_only_shadowed() -> None:
    made = stream(policy(scheduler=EARLY | {"max_think_tokens": 6}))
    made.open("a")
    made.step(10)
    assert made.session.totals.ends == {"hard_cap": 1}
    assert not made.session.totals.below_cap
    shadowed = stream(policy(scheduler=EARLY | {"max_think_tokens": 600, "shadow": True}, entropy=CALIBRATED))
    shadowed.open("a")
    shadowed.step(20)
    assert shadowed.session.totals.ends == {"eat": 1}
    assert not shadowed.session.totals.below_cap


def test_preemptions_by_phase() -> None:
    made = stream()
    made.open("thinks")
    made.open("answers", think=2)
    made.step(5)
    for name in ("thinks", "answers"):
        made.agent.preempt(name)
    made.step()
    made.agent.preempt("thinks", waits=False)
    made.step()
    made.agent.preempt("thinks")
    made.step()
    assert made.session.totals.preempted == {"think": 2, "output": 1}


def test_the_age_of_a_decision_when_it_was_applied() -> None:
    made = stream()
    made.open("a")
    made.step(4)
    staleness = made.session.totals.staleness_steps
    applied = made.session.totals.settled["plan", "applied"]
    assert applied > 0
    assert staleness.counts.tolist() == [applied, *[0] * (len(staleness.counts) - 1)], "the step after its report"


def test_totals_add_up() -> None:
    made = stream(policy(scheduler=EARLY | {"max_think_tokens": 600}, entropy=CALIBRATED))
    made.open("a")
    made.step(20)
    made.agent.preempt("a")
    made.step()
    twice, once = Totals(), made.session.totals
    twice.add(once)
    twice.add(once)
    assert twice.settled == {key: 2 * n for key, n in once.settled.items()}
    assert twice.below_cap == {key: 2 * n for key, n in once.below_cap.items()}
    assert twice.preempted == {"output": 2}
    assert twice.staleness_steps.sum == 2 * once.staleness_steps.sum > 0
