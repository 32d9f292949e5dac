"""Ends of thinking that spill: what is counted after forced and natural ends, and how the two are compared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from meridian.v1 import agent_pb2, fleet_pb2

from meridian_control.capabilities.control_group import savings
from meridian_control.common.histogram import answer_histogram
from tests.fakes.tables import policy
from tests.unit.control.capabilities.control_group.test_stream import CONTROL, HALF, RULES, TREATED, counts
from tests.unit.sessions import EARLY, stream

if TYPE_CHECKING:
    from numpy.typing import NDArray

MARGIN = 0.05


def side(of: fleet_pb2.EndCounts) -> tuple[int, int, int, int]:
    return of.ends, of.reentries, of.empty_answers, of.aborts


# --------------------------------------------------------------------------------------------------------------- counts


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
    assert sum(told.forced_ends.answer_tokens.counts) == int(not rethink_at)
    assert told.natural_ends.answer_tokens.sum == 5


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
    """An answer that the client aborts is not empty, however short it is; it counts with the length that it had."""
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


# ------------------------------------------------------------------------------------------------------------ estimates


def ends(lengths: list[int], reentries: int = 0) -> fleet_pb2.EndCounts:
    made = fleet_pb2.EndCounts(ends=len(lengths) + reentries, reentries=reentries)
    return count_answers(made, np.array(lengths, float))


def count_answers(made: fleet_pb2.EndCounts, lengths: NDArray[np.float64]) -> fleet_pb2.EndCounts:
    tokens = answer_histogram()
    if made.HasField("answer_tokens"):
        tokens.add_counts(np.array(made.answer_tokens.counts, np.int64), made.answer_tokens.sum)
    tokens.add(lengths)
    made.answer_tokens.CopyFrom(tokens.message())
    return made


def compared(forced: fleet_pb2.EndCounts, natural: fleet_pb2.EndCounts) -> fleet_pb2.Savings:
    made = fleet_pb2.Savings(forced_ends=forced, natural_ends=natural)
    savings.estimate(made)
    return made


def test_long_answers_are_longer_than_those_after_natural_ends() -> None:
    natural = ends([*range(10, 105), *[150] * 5])
    made = compared(ends([100] * 60 + [101] * 40, reentries=100), natural)
    assert made.long_answer_tokens == 125, "95 of 100 natural answers have at most 104 tokens"
    assert (made.natural_ends.long_answers, made.forced_ends.long_answers) == (5, 0)
    assert made.long_answers.value == pytest.approx(-0.05)
    assert made.spills.value == pytest.approx(0.5 - 0.05)
    assert made.spills.low < made.spills.value < made.spills.high
    longer = compared(ends([100] * 60 + [126] * 40), natural)
    assert longer.long_answers.value == longer.spills.value == pytest.approx(0.4 - 0.05)


@pytest.mark.parametrize(("forced", "natural", "known"), [(29, 30, False), (30, 29, False), (30, 30, True)])
def test_too_few_ends_say_nothing(forced: int, natural: int, known: bool) -> None:
    made = compared(ends([5] * forced), ends([5] * natural))
    assert [made.HasField(name) for name in ("long_answer_tokens", "long_answers", "spills")] == [known] * 3
    assert made.forced_ends.HasField("long_answers") == known


def test_natural_ends_that_all_think_again_have_no_usual_length() -> None:
    made = compared(ends([100_001] * 40), ends([], reentries=40))
    assert (made.long_answer_tokens, made.forced_ends.long_answers) == (100_000, 40)
    assert made.spills.value == 0


def test_counts_of_replicas_add_unless_their_buckets_differ() -> None:
    parts = [
        fleet_pb2.Savings(rules="r", forced_ends=ends([7, 9], reentries=1), natural_ends=ends([5])) for _ in range(2)
    ]
    parts[1].natural_ends.answer_tokens.bounds[0] = 0.5
    (whole,) = savings.merged(fleet_pb2.GetSavingsResponse(savings=[part]) for part in parts).savings
    assert side(whole.forced_ends) == (6, 2, 0, 0)
    assert (whole.forced_ends.answer_tokens.sum, sum(whole.forced_ends.answer_tokens.counts)) == (32, 4)
    assert side(whole.natural_ends) == (1, 0, 0, 0)
    early = fleet_pb2.Savings(rules="r")
    (late,) = savings.merged(fleet_pb2.GetSavingsResponse(savings=[part]) for part in (early, parts[0])).savings
    assert late.natural_ends == parts[0].natural_ends, "a replica of an earlier version sends no ends"


# --------------------------------------------------------------------------------------------------------------- alarms


def alarm(rng: np.random.Generator, spilled: float, reentry: float, natural: int) -> int | None:
    """Return the number of natural ends at which the alert would fire, None if it does not.

    There are 49 forced ends for each natural one, as at the default share. spilled: share of the forced ends with a
    tenfold answer. reentry: share of all ends after which the request thinks again. The looks are 5 natural ends apart.
    """
    forced, usual = fleet_pb2.EndCounts(), fleet_pb2.EndCounts()
    for number in range(1, natural + 1):
        for made, count, long in ((usual, 1, 0.0), (forced, 49, spilled)):
            again = int(rng.binomial(count, reentry))
            made.ends += count
            made.reentries += again
            lengths = rng.lognormal(5.5, 0.8, count - again)
            count_answers(made, np.where(rng.random(len(lengths)) < long, 10 * lengths, lengths))
        if number % 5 == 0:
            told = compared(forced, usual)
            if told.HasField("spills") and told.spills.low > MARGIN:
                return number
    return None


def test_runs_without_a_difference_raise_no_alarm() -> None:
    rng = np.random.default_rng(4)
    found = [alarm(rng, 0.0, reentry, 300) for reentry in (0.0, 0.1, 0.3) for _ in range(20)]
    assert sum(one is not None for one in found) <= 1


def test_ends_that_spill_are_found_soon() -> None:
    rng = np.random.default_rng(5)
    found = [alarm(rng, 1 / 3, reentry, 100) for reentry in (0.0, 0.1) for _ in range(20)]
    assert all(found)


@pytest.mark.parametrize(
    ("spilling", "found"), [({}, False), ({"cut_answer_tokens": 40}, True), ({"rethink_at": 1}, True)]
)
def test_a_model_that_spills_when_it_is_cut(spilling: dict[str, Any], found: bool) -> None:
    """Every third request goes on thinking if its thinking is cut: in an answer that is too long, or in a second block
    of thinking."""
    made = stream(HALF)
    for batch in range(4):
        for number, name in enumerate(f"r{batch}-{n}" for n in range(50)):
            made.open(name, think=24, answer=3 + number % 5, **(spilling if number % 3 == 0 else {}))
        while made.agent.engine.live:
            made.step()
    told = counts(made)
    assert min(told.forced_ends.ends, told.natural_ends.ends) > 60
    assert (told.spills.low > MARGIN) == found
    assert told.natural_ends.reentries == 0
    assert told.saved_ratio.low > 0.2
    own_estimate = told.shadow_saved_tokens / told.control.think_tokens
    assert spilling or abs(own_estimate - told.saved_ratio.value) < 0.05, "the shadow's own estimate agrees"
