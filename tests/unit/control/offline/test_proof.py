"""How often rules are proved, and how often a proved rule loses more than is allowed."""

from __future__ import annotations

import random

import numpy as np
import pytest

from meridian_control.offline.calibration import SPARE, Goal, Halves, Tried, calibrate
from meridian_control.offline.correctness import from_probes
from meridian_control.offline.rule_replay import EAT_SENTENCE, Replay, StoppingRule, Stops
from meridian_control.offline.self_calibration import DELAY_TOKENS, episodes_of, judged, stopping_rule
from meridian_control.policy.model import Policy
from tests.fakes.episodes import Traffic

BASE = Policy.model_validate({"scheduler": {"min_think_tokens": 256}})


def replay_of(traffic: Traffic, seed: int, count: int) -> Replay:
    episodes = episodes_of(traffic.episodes(random.Random(seed), count), 256)
    return Replay(episodes, from_probes(episodes), BASE, DELAY_TOKENS)


def test_where_safe_rules_are_close_to_the_allowed_loss_one_is_proved() -> None:
    """Of this traffic, rules that save more than four tenths of the thinking lose more than two answers in a hundred,
    and rules that save three tenths lose one."""
    goal, traffic, saved = Goal(0.02, attempt=1), Traffic(misled=0.03), list[float]()
    fresh = traffic.episodes(random.Random(100), 3000)
    for seed in range(3):
        replay = replay_of(traffic, seed, 1600)
        for unattended in (False, True):
            found = calibrate(replay, goal, families=[EAT_SENTENCE], unattended=unattended)
            assert found.recommended is not None, (seed, unattended)
            saved.append(found.recommended.held_out.saved)
            floor = found.policy.scheduler.min_think_tokens
            really = judged(BASE, fresh, dict(found.recommended.rule.entropy), floor)
            assert really["harmful"] <= 0.02 * really["requests"], (seed, unattended)
    assert min(np.mean(saved[::2]), np.mean(saved[1::2])) > 0.15


def test_no_rule_is_proved_that_saves_less_than_half_of_what_seems_possible() -> None:
    """With a rule in force, self-calibration looks for no better one."""
    proved = 0
    for seed in range(8):
        replay = replay_of(Traffic(misled=0.03), seed, 366)
        found = calibrate(replay, Goal(0.02, attempt=1), families=[EAT_SENTENCE], unattended=True)
        if found.recommended is not None:
            target = found.halves.target(found.tried[EAT_SENTENCE], SPARE)
            assert target is not None
            assert found.recommended.fit.saved > target.saved / 2
            proved += 1
    assert proved > 1


@pytest.mark.parametrize(("safe", "nested"), [(0, False), (9, False), (9, True)])
def test_rules_that_lose_too_much_are_proved_no_more_often_than_one_bound_errs(safe: int, nested: bool) -> None:
    """safe: number of rules that lose little enough; nine lose too much. nested: whether each rule harms all requests
    that the rules before it harm."""
    goal, rng, wrong, reached = Goal(0.05), np.random.default_rng(1), 0, list[int]()
    replay, requests = replay_of(Traffic(), 1, 400), np.arange(400)
    halves = Halves(replay, requests[:100], requests[100:], requests, goal)
    losses = [*np.linspace(0.0, 0.04, safe), *np.linspace(0.0501, 0.06, 9)]
    rule, at = stopping_rule({}), np.zeros(400)
    for _ in range(1500):
        drawn, path = rng.random(400), []
        for loss in losses:
            right = (drawn if nested else rng.random(400)) >= loss
            path.append(tried(rule, Stops(at, right.astype(float), at, at.astype(np.int64))))
        proved = halves.proved(path)[1]
        wrong += proved > safe
        reached.append(proved)
    assert wrong <= 0.05 * 1500
    assert np.mean(reached) > safe / 3, "most rules that lose little are reached"


def tried(rule: StoppingRule, stops: Stops) -> Tried:
    """Return a rule whose figures on the first half do not matter, because its place on the path is settled."""
    return Tried(rule, stops, 0.0, 0.0, 0.0)
