"""Counters that sessions keep only for the metrics."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from meridian_control.capabilities.listed import CAPABILITIES
from meridian_control.fleet.fleet import Fleet
from meridian_control.policy.model import Policy
from tests.fakes.agent import hello
from tests.fakes.fleets import totals_of
from tests.fakes.tables import policy
from tests.unit.sessions import CALIBRATED, EARLY, Act, opens, play, preempts, stream, totals


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


CAPPED = EARLY | {"max_think_tokens": 600}
COUNTED: dict[str, tuple[Policy, tuple[Act, ...]]] = {
    "nothing is left to a cap that ended the thinking": (
        policy(scheduler=EARLY | {"max_think_tokens": 6}),
        (opens("a"), 10, totals(ends={"hard_cap": 1}, below_cap={})),
    ),
    "nor to a cap in shadow": (
        policy(scheduler=CAPPED | {"shadow": True}, entropy=CALIBRATED),
        (opens("a"), 20, totals(ends={"eat": 1}, below_cap={})),
    ),
    "preemptions by phase": (
        policy(),
        (
            *(opens("thinks"), opens("answers", 2), 5, preempts("thinks"), preempts("answers"), 1),
            *(preempts("thinks", waits=False), 1, preempts("thinks"), 1, totals(preempted={"think": 2, "output": 1})),
        ),
    ),
    "nothing saved where no rule in shadow would have ended a request": (
        policy(entropy={"shadow": True}),
        (
            *(opens("a", 5), 10, totals(shadow_saved={("entropy", "any"): 0, ("loop", "any"): 0})),
            totals(shadow_think_tokens={"entropy": 5, "loop": 5}),
        ),
    ),
}


@pytest.mark.parametrize(("first", "acts"), COUNTED.values(), ids=COUNTED)
def test_what_is_counted(first: Policy, acts: tuple[Act, ...]) -> None:
    play(stream(first), *acts)


@pytest.mark.parametrize(
    ("scheduler", "own_cap", "cap"),
    [
        (CAPPED, None, 600),
        (CAPPED, 300, 300),
        (CAPPED | {"shadow": True}, 300, 300),
        (CAPPED | {"shadow": True}, None, None),
        (CAPPED | {"enabled": False}, 300, 300),
    ],
    ids=[
        "the policy's",
        "the request's own",
        "its own, the policy's in shadow",
        "in shadow",
        "its own, the policy's off",
    ],
)
def test_thinking_tokens_left_to_the_cap_in_force(
    scheduler: dict[str, Any], own_cap: int | None, cap: int | None
) -> None:
    """The agent counts the same tokens for vLLM's metrics."""
    made = stream(policy(scheduler=scheduler, entropy=CALIBRATED))
    slot = made.open("a", own_cap=own_cap)
    made.step(20)
    left = cap - int(made.session.table.think_tokens[slot]) if cap is not None else 0
    assert made.session.totals.ends == {"eat": 1}
    assert made.session.totals.below_cap["eat"] == left == made.agent.engine.tracker.saved_tokens


def test_the_age_of_a_decision_when_it_was_applied() -> None:
    """The age of what waits for its place is not counted: a tier is applied when its request ends."""
    made = play(stream(), opens("a", 5, 5), 40)
    settled, staleness = made.session.totals.settled, made.session.totals.staleness_steps
    assert (settled["tier", "applied"], settled["plan", "applied"] > 0) == (1, True)
    assert staleness.counts.tolist() == [settled["plan", "applied"], *[0] * (len(staleness.counts) - 1)]


def test_tokens_that_rules_in_shadow_would_have_saved() -> None:
    made = stream(policy(scheduler=CAPPED, entropy=CALIBRATED | {"shadow": True}))
    made.agent.eat_nats = 0.01
    made.open("a", think=30)
    made.step(40)
    (eat,) = [row for row in made.session.shadow.messages() if row.reason == "eat"]
    assert 0 < eat.saved_tokens == 30 - eat.would_end_think_tokens
    saved = {("entropy", "any"): eat.saved_tokens, ("entropy", "eat"): eat.saved_tokens, ("loop", "any"): 0}
    assert made.session.totals.shadow_saved == saved
    assert made.session.totals.shadow_think_tokens == {"entropy": 30, "loop": 30}
    made.apply(policy(entropy=CALIBRATED))
    assert made.session.totals.shadow_saved == saved, "unlike the comparison, the counter goes on under a new policy"


def test_counters_do_not_fall_while_a_replaced_stream_has_not_ended() -> None:
    fleet = Fleet(lambda: datetime(2026, 1, 1, tzinfo=UTC), capabilities=CAPABILITIES)
    first = fleet.join(hello("e"))
    first.session.totals.reports = 7
    second = fleet.join(hello("e"))
    second.session.totals.reports = 2
    assert totals_of(fleet).reports == 9
    fleet.leave(first, "replaced")
    assert totals_of(fleet).reports == 9
