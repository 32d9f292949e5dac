"""Episodes that are let through in the order in which their requests began: at any time they are of all lengths."""

from __future__ import annotations

import heapq
import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from meridian_control.capabilities.self_calibration import in_order
from meridian_control.capabilities.self_calibration.episodes import Episode, LeftOut
from meridian_control.capabilities.self_calibration.in_order import InOrder
from meridian_control.capabilities.self_calibration.learner import fewest
from meridian_control.offline.calibration import Goal
from meridian_control.offline.self_calibration import found
from meridian_control.policy.model import Policy
from tests.fakes.episodes import Traffic

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
A, B = object(), object()
# The rule loses the answers of all long requests, which are a tenth.
SHORT = Traffic(settles=(0.2, 0.5))
LONG = replace(SHORT, think_tokens=15_000.0, settles=(0.9, 1.0), misled=1.0)
LONG_SHARE = 0.1
LONG_TOKENS = 6_000


class Book:
    """What is let through, as `traffic: name`, and a clock."""

    def __init__(self) -> None:
        self.now, self.through, self.left_out = BEGIN, list[str](), list[LeftOut]()
        self.in_order = InOrder(self.take, lambda: self.now)

    def take(self, traffic: str, found: Episode | LeftOut) -> None:
        if isinstance(found, LeftOut):
            self.left_out.append(found)
        else:
            self.through.append(found.name)

    def begin(self, *slots: int, owner: object = A, traffic: str = "t") -> None:
        for slot in slots:
            self.in_order.begin(owner, slot, traffic)

    def end(self, *slots: int, owner: object = A) -> None:
        for slot in slots:
            self.in_order.end(owner, slot, "t", Episode(str(slot), 10, ()))


@pytest.fixture
def book() -> Book:
    return Book()


def test_an_episode_waits_for_all_requests_that_began_before_it(book: Book) -> None:
    book.begin(0, 1, 2, 3)
    book.end(1, 2)
    assert book.through == []
    book.end(0)
    assert book.through == ["0", "1", "2"]
    book.end(3)
    assert book.through == ["0", "1", "2", "3"]


@pytest.mark.parametrize("result", [None, LeftOut.FAR])
def test_a_request_without_an_episode_lets_the_others_through(book: Book, result: LeftOut | None) -> None:
    book.begin(0, 1)
    book.end(1)
    book.in_order.end(A, 0, "t", result)
    assert (book.through, book.left_out) == (["1"], [result] if result else [])


def test_a_request_that_is_left_out_waits_for_its_turn_too(book: Book) -> None:
    """Otherwise those that are left out would be most of all that are counted."""
    book.begin(0, 1, 2)
    book.end(1)
    book.in_order.end(A, 2, "t", LeftOut.FAR)
    assert (book.through, book.left_out) == ([], [])
    book.end(0)
    assert (book.through, book.left_out) == (["0", "1"], [LeftOut.FAR])


def test_requests_of_all_streams_wait_for_each_other_and_traffics_do_not(book: Book) -> None:
    book.begin(0)
    book.begin(1, owner=B)
    book.begin(2, owner=B, traffic="u")
    book.end(2, owner=B)
    assert book.through == ["2"]
    book.end(1, owner=B)
    assert book.through == ["2"]
    book.end(0)
    assert book.through == ["2", "0", "1"]


def test_a_request_that_did_not_begin_here_is_not_recorded(book: Book) -> None:
    book.in_order.end(A, 0, "t", LeftOut.FAR)
    book.end(1)
    assert (book.through, book.left_out) == ([], [])


def test_with_a_running_request_go_those_that_began_after_it_and_have_ended(book: Book) -> None:
    """They are the short ones of their time. Those of other streams, and those that began earlier, stay."""
    book.begin(9, owner=B)
    book.begin(4, 0, 1, 2, 3)
    book.begin(8, owner=B)
    book.end(0, 2)
    book.end(8, owner=B)
    book.in_order.forget(A, lambda slot: slot != 1)
    book.end(1, 3)
    book.end(9, owner=B)
    assert book.through == ["9"]
    book.end(4)
    assert book.through == ["9", "4", "0", "8"]
    book.begin(1)
    book.end(1)
    assert book.through == ["9", "4", "0", "8", "1"]


def test_those_of_others_need_not_wait_for_a_request_that_goes(book: Book) -> None:
    book.begin(0)
    book.begin(1, owner=B)
    book.end(1, owner=B)
    book.in_order.forget(A, lambda slot: False)
    assert book.through == ["1"]


def test_nothing_goes_while_all_go_on(book: Book) -> None:
    book.begin(0, 1, 2)
    book.end(1)
    book.in_order.forget(A, lambda slot: True)
    book.end(0, 2)
    assert book.through == ["0", "1", "2"]


def test_a_request_that_runs_for_hours_is_not_waited_for(book: Book) -> None:
    book.begin(0, 1)
    book.end(1)
    book.now += in_order.PATIENCE
    book.begin(2)
    assert book.through == []
    book.now += timedelta(seconds=1)
    book.end(2)
    assert book.through == ["1", "2"]
    book.end(0)
    assert book.through == ["1", "2"]


def test_requests_beyond_the_limits_are_not_recorded_however_short(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_order, "MAX_BEGUN", 2)
    book.begin(0, 1, 2)
    book.end(2, 1, 0)
    assert book.through == ["0", "1"]
    monkeypatch.setattr(in_order, "MAX_BYTES", 2 * len(Episode("0", 10, ()).to_json()))
    book.begin(3)
    book.begin(4, traffic="u")
    book.begin(5, traffic="v")
    book.end(5, 4, 3)
    assert book.through == ["0", "1", "4", "3"]


def traffic_until(rng: random.Random, at_once: int, count: int) -> tuple[list[Episode], list[Episode]]:
    """Return the first `count` episodes of requests of which `at_once` run, in the order in which they end, and as they
    are let through."""
    ended, through, book = list[Episode](), list[Episode](), Book()
    in_turn = InOrder(lambda traffic, episode: through.append(episode), lambda: book.now)  # type: ignore[arg-type]
    running = list[tuple[int, int, Episode]]()

    def begin(slot: int, now: int) -> None:
        episode = (LONG if rng.random() < LONG_SHARE else SHORT).episode(rng, f"{rng.getrandbits(64)}")
        heapq.heappush(running, (now + episode.natural_tokens, slot, episode))
        in_turn.begin(A, slot, "t")

    for slot in range(at_once):
        begin(slot, 0)
    while len(through) < count:
        now, slot, episode = heapq.heappop(running)
        ended.append(episode)
        in_turn.end(A, slot, "t", episode)
        begin(slot, now)
    return ended[:count], through[:count]


def long_share(episodes: list[Episode]) -> float:
    return sum(episode.natural_tokens > LONG_TOKENS for episode in episodes) / len(episodes)


def test_where_more_run_at_once_than_an_attempt_reads_no_rule_is_proved_that_loses_the_long_ones() -> None:
    needed, goal = fewest(1, 0.02), Goal(0.02, attempt=1)
    base = Policy.model_validate({"scheduler": {"min_think_tokens": 256}})
    ended, through = traffic_until(random.Random(3), 2 * needed, needed)
    assert long_share(ended) < 0.01
    assert long_share(through) == pytest.approx(LONG_SHARE, abs=0.04)
    assert "rule" in found(base, ended, goal), "the traffic does not mislead"
    assert "rule" not in found(base, through, goal)


def test_a_faulty_agent_that_begins_a_request_in_a_taken_slot_spoils_no_other(book: Book) -> None:
    book.begin(0)
    book.begin(0)
    book.now += in_order.PATIENCE + timedelta(seconds=1)
    book.begin(0, owner=B)
    book.end(0, owner=B)
    assert book.through == ["0"]
    assert not any(book.in_order._running.values())
    assert (book.in_order._begun, book.in_order._count) == ({}, 0)
