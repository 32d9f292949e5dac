"""Counts of requests by the time of their beginning: long and short ones come into the figures together."""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import pytest
from meridian.v1 import agent_pb2, fleet_pb2

from meridian_control.capabilities.control_group import savings
from meridian_control.capabilities.control_group.cohorts import LENGTH, PATIENCE, Cohort, Cohorts
from meridian_control.capabilities.control_group.experiments import Experiment, add_arms
from meridian_control.capabilities.control_group.stream import ControlGroup
from meridian_control.common.slices import at_once
from tests.unit.control.capabilities.control_group.test_stream import CONTROL, HALF, OTHER, TREATED, counts
from tests.unit.sessions import NOW, Stream, stream


class Book:
    """Cohorts, and how many requests they have counted."""

    def __init__(self) -> None:
        self.counts = fleet_pb2.Savings()
        self.cohorts = Cohorts(self.counts, add_arms)

    @property
    def counted(self) -> int:
        return int(self.counts.treated.requests)

    def join(self, after: timedelta = timedelta()) -> Cohort:
        return self.cohorts.join(NOW + after)

    def end(self, cohort: Cohort) -> None:
        cohort.counts.treated.requests += 1
        cohort.leave()


@pytest.fixture
def book() -> Book:
    return Book()


def test_a_cohort_counts_once_it_and_all_earlier_ones_have_ended(book: Book) -> None:
    first, same = book.join(), book.join(LENGTH / 2)
    second = book.join(LENGTH)
    assert first is same is not second
    book.end(second)
    book.end(first)
    assert book.counted == 0
    book.end(same)
    assert book.counted == 3


def test_requests_one_after_the_other_count_at_once(book: Book) -> None:
    for number in range(3):
        book.end(book.join())
        assert book.counted == number + 1


def test_a_request_that_is_lost_keeps_no_other_from_counting(book: Book) -> None:
    lost, other = book.join(), book.join(LENGTH)
    book.end(other)
    lost.leave()
    assert book.counted == 1


def test_a_request_that_runs_for_hours_counts_when_it_closes(book: Book) -> None:
    long = book.join()
    book.end(book.join(LENGTH))
    book.end(book.join(PATIENCE))
    assert book.counted == 0
    book.end(book.join(PATIENCE + timedelta(seconds=1)))
    assert book.counted == 3
    book.end(long)
    assert book.counted == 4


def test_a_clock_that_is_set_back_begins_another_cohort(book: Book) -> None:
    before, after = book.join(), book.join(-LENGTH)
    assert before is not after
    book.end(after)
    assert book.counted == 0
    book.end(before)
    assert book.counted == 2


# --------------------------------------------------------------------------------------------------------- in a stream


def counted(made: Stream) -> list[int]:
    """Return the counted requests of the control group under each set of rules that has any counts."""
    told = savings.messages(made.session.part(ControlGroup).experiments, None)
    return [row.control.requests for row in told]


def short_beside_long() -> Stream:
    """Run a request of the control group to its end while one runs that began before."""
    made = stream(HALF)
    made.agent.eat_nats = 3.0
    made.open(TREATED, think=400, answer=2)
    made.step()
    made.open(CONTROL, think=20, answer=2)
    made.step(40)
    return made


def test_a_request_counts_with_those_that_began_before_it_and_its_harm_at_once() -> None:
    made = short_beside_long()
    (told,) = savings.messages(made.session.part(ControlGroup).experiments, None)
    assert (told.treated.requests, told.control.requests, told.judged) == (0, 0, 1)
    assert (told.treated.waiting_requests, told.control.waiting_requests) == (0, 1)
    made.step(380)
    told = counts(made)
    assert (told.treated.requests, told.control.requests, told.control.waiting_requests) == (1, 1, 0)
    assert (told.treated.think_tokens, told.control.think_tokens) == (400, 20)


@pytest.mark.parametrize("event", ["an abort", "other rules", "a snapshot", "an end"])
def test_a_request_that_does_not_go_on_under_the_rules_keeps_no_other_from_counting(event: str) -> None:
    made = short_beside_long()
    assert counted(made) == [0]
    if event == "an abort":
        made.agent.abort(TREATED)
        made.step()
    elif event == "other rules":
        made.apply(OTHER)
    elif event == "a snapshot":
        # It has closed meanwhile.
        snapshot = agent_pb2.Snapshot(step=made.session._ledger.step)
        made.session.on_message(agent_pb2.ConnectRequest(snapshot=snapshot), made.now)
    else:
        at_once(made.session.closing(made.now))
    assert counted(made) == [1]


def test_a_request_that_began_later_keeps_none_from_counting() -> None:
    made = stream(HALF)
    made.agent.eat_nats = 3.0
    made.open(CONTROL, think=40, answer=2)
    made.step()
    made.now += LENGTH
    made.open(TREATED, think=400, answer=2)
    made.step(60)
    assert counted(made) == [1]


def test_a_waiting_request_under_other_rules_counts_for_these() -> None:
    """It has no token yet, so that it begins under them."""
    made = stream(HALF)
    made.agent.eat_nats, made.agent.places = 3.0, 1
    made.open(TREATED, think=30, answer=2)
    made.step()
    made.open(CONTROL, think=20, answer=2)
    made.step(5)
    made.apply(OTHER)
    made.step(80)
    assert counts(made).since_revision == made.revision
    assert counted(made) == [1]


# ------------------------------------------------------------------------------------------------- what users are told

# Requests a second; their mean duration in seconds and its spread; the share of the control group; the cap in seconds.
RATE, MEAN_S, SIGMA, SHARE, CAP_S = 4.0, 100.0, 1.0, 0.1, 83.3
# What the cap saves of a mean request, in seconds, and as a share.
TRUTH_S, TRUTH = 44.0, 0.44


def estimates(seed: int, minutes: list[int], *, by_cohorts: bool) -> list[fleet_pb2.Savings]:
    """Return what is told of a second a token after so many minutes of new rules."""
    rng, told, experiment = np.random.default_rng(seed), list[fleet_pb2.Savings](), Experiment()
    began_s = np.cumsum(rng.exponential(1 / RATE, int(minutes[-1] * 60 * RATE)))
    natural_s = rng.lognormal(np.log(MEAN_S) - SIGMA**2 / 2, SIGMA, len(began_s))
    control = rng.random(len(began_s)) < SHARE
    lasts_s = np.where(control, natural_s, np.minimum(natural_s, CAP_S))
    events = [(time_s, -1, number) for number, time_s in enumerate(began_s)]
    events += [(time_s, number, number) for number, time_s in enumerate(began_s + lasts_s)]
    events += [(60.0 * minute, -2, 0) for minute in minutes]
    joined = dict[int, Cohort]()
    for time_s, kind, number in sorted(events):
        if kind == -2:
            told.append(fleet_pb2.Savings())
            told[-1].CopyFrom(experiment.counts)
            savings.estimate(told[-1])
        elif kind == -1:
            joined[number] = experiment.cohorts.join(NOW + timedelta(seconds=time_s))
        else:
            cohort = joined.pop(number)
            counts_in = cohort.counts if by_cohorts else experiment.counts
            arm = counts_in.control if control[number] else counts_in.treated
            arm.requests += 1
            arm.think_tokens += int(lasts_s[number])
            arm.think_tokens_squares += float(lasts_s[number]) ** 2
            cohort.leave()
    return told


def wrong(told: list[fleet_pb2.Savings]) -> int:
    """Return how many of the figures have an interval without the truth."""
    return sum(not row.saved_tokens.low <= TRUTH_S <= row.saved_tokens.high for row in told)


def test_a_figure_soon_after_new_rules_is_hardly_ever_too_low() -> None:
    told = [row for seed in range(20) for row in estimates(seed, [20], by_cohorts=True) if row.HasField("saved_tokens")]
    assert len(told) >= 16
    assert wrong(told) <= 6
    assert np.mean([row.saved_ratio.value for row in told]) == pytest.approx(TRUTH, abs=0.06)
    as_they_end = [row for seed in range(6) for row in estimates(seed, [20], by_cohorts=False)]
    assert wrong(as_they_end) >= 4, "the short ones come first"
