"""What is counted after forced and natural ends of thinking."""

from __future__ import annotations

import pytest
from meridian.v1 import agent_pb2, fleet_pb2

from meridian_control.capabilities.control_group import savings
from tests.fakes.tables import policy
from tests.unit.control.capabilities.control_group.test_stream import CONTROL, HALF, RULES, TREATED, counts
from tests.unit.sessions import EARLY, stream


def side(of: fleet_pb2.EndCounts) -> tuple[int, int, int, int]:
    return of.ends, of.reentries, of.empty_answers, of.aborts


@pytest.mark.parametrize("rethink_at", [0, 2])
def test_forced_ends_and_natural_ends_of_the_same_requests(rethink_at: int) -> None:
    made = stream(HALF)
    for name in (CONTROL, TREATED):
        made.open(name, think=30, answer=5, rethink_at=rethink_at)
    made.step(60)
    assert not made.agent.engine.live
    told = counts(made)
    assert side(told.natural_ends) == (1, 0, 0, 0)
    assert side(told.forced_ends) == (1, int(bool(rethink_at)), 0, 0)
    assert (told.control.stopped, told.treated.stopped) == (1, 1), "the rule ended the thinking, whatever came later"
    assert told.treated.reentries == int(bool(rethink_at))


def test_a_second_thinking_without_an_end_is_a_reentry() -> None:
    made = stream(HALF)
    made.open(TREATED, think=1000, answer=5, rethink_at=1)
    made.step(40)
    made.agent.engine.finish(TREATED, agent_pb2.FINISH_REASON_LENGTH)
    made.step()
    told = counts(made)
    assert side(told.forced_ends) == (1, 1, 0, 0)
    assert (told.treated.reentries, told.treated.answers) == (1, 0)


@pytest.mark.parametrize(
    ("answer", "reason", "counted"),
    [
        (1, None, (1, 0, 1, 0)),
        (2, None, (1, 0, 0, 0)),
        (1000, agent_pb2.FINISH_REASON_LENGTH, (1, 0, 0, 0)),
        (1000, agent_pb2.FINISH_REASON_ABORT, (1, 0, 0, 0)),
        (1000, "the client has gone", (1, 0, 0, 1)),
    ],
)
def test_empty_answers_and_aborts(answer: int, reason: int | str | None, counted: tuple[int, ...]) -> None:
    """An answer that the client aborts is not empty, however short it is."""
    made = stream(HALF)
    made.open(TREATED, think=30, answer=answer)
    made.step(30)
    if isinstance(reason, str):
        made.agent.engine.abort(TREATED)
    elif reason is not None:
        made.agent.engine.finish(TREATED, reason)
    if reason is not None:
        made.step()
    assert side(counts(made).forced_ends) == counted


@pytest.mark.parametrize(("cap", "kind"), [(2, "cap"), (25, "entropy")])
def test_ends_count_for_the_kind_that_comes_first(cap: int, kind: str) -> None:
    """A cap of 2 comes before the rule, and a cap of 25 after it; neither holds for the control group."""
    made = stream(policy(scheduler={**EARLY, "max_think_tokens": cap}, entropy={**RULES, "holdout_share": 0.5}))
    for name in (CONTROL, TREATED):
        made.open(name, think=30, answer=3)
    made.step(50)
    told = counts(made)
    ends = {harm.kind: (harm.natural_ends.ends, harm.forced_ends.ends) for harm in told.kinds}
    assert ends == {"entropy": (0, 0), "cap": (0, 0), kind: (1, 1)}
    assert (told.natural_ends.ends, told.forced_ends.ends) == (1, 1)
    assert told.control.think_tokens == 30


def test_a_request_that_no_rule_would_have_ended_is_on_neither_side() -> None:
    made = stream(HALF)
    made.agent.eat_nats = 3.0
    for name in (CONTROL, TREATED):
        made.open(name, think=20, answer=3)
    made.step(40)
    told = counts(made)
    assert (told.control.requests, told.treated.requests) == (1, 1)
    assert (told.natural_ends.ends, told.forced_ends.ends) == (0, 0)


def test_counts_of_replicas_add() -> None:
    forced = fleet_pb2.EndCounts(ends=3, reentries=1, empty_answers=1, lengths=1)
    parts = [fleet_pb2.Savings(rules="r", forced_ends=forced) for _ in range(2)]
    parts[1].natural_ends.aborts = 4
    (whole,) = savings.merged(fleet_pb2.GetSavingsResponse(savings=[part]) for part in parts).savings
    assert (*side(whole.forced_ends), whole.forced_ends.lengths) == (6, 2, 2, 0, 2)
    assert side(whole.natural_ends) == (0, 0, 0, 4)
    early = fleet_pb2.Savings(rules="r")
    (late,) = savings.merged(fleet_pb2.GetSavingsResponse(savings=[part]) for part in (early, parts[0])).savings
    assert late.forced_ends == forced, "a replica of an earlier version sends no ends"


@pytest.mark.parametrize("rethink_at", [0, 1])
def test_a_model_that_thinks_again_when_it_is_cut(rethink_at: int) -> None:
    """Every third request thinks again if its thinking is cut."""
    made = stream(HALF)
    for batch in range(4):
        for number, name in enumerate(f"r{batch}-{n}" for n in range(50)):
            made.open(name, think=24, answer=3 + number % 5, rethink_at=rethink_at if number % 3 == 0 else 0)
        while made.agent.engine.live:
            made.step()
    told = counts(made)
    assert min(told.forced_ends.ends, told.natural_ends.ends) > 60
    assert (told.forced_ends.reentries > 20) == bool(rethink_at)
    assert told.natural_ends.reentries == 0
    assert told.saved_ratio.low > 0.2
    own_estimate = told.shadow_saved_tokens / told.control.think_tokens
    assert rethink_at or abs(own_estimate - told.saved_ratio.value) < 0.05, "the shadow's own estimate agrees"
