"""The calibration of episodes: what it proves and refuses, and that a control plane needs no scipy for it."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from meridian_control.capabilities.self_calibration.episodes import Episode, Sample
from meridian_control.capabilities.self_calibration.learner import fewest
from meridian_control.offline.calibration import Goal
from meridian_control.offline.self_calibration import CHOSEN, found, judged, work
from meridian_control.policy.model import Policy
from tests.fakes.episodes import GAP_TOKENS, Traffic

BASE = Policy.model_validate({"scheduler": {"min_think_tokens": 256}})
GOAL = Goal(0.02, attempt=1)
EASY, MISLED = Traffic(), Traffic(misled=0.2)
# Trial answers hardly ever change, as if nearly each answer began with a line break.
ALIKE = Traffic(settles=(0.0, 0.1), differs=False)
NOTHING = "no rule that saves anything loses little enough on the half that chooses"
LEVEL = {
    "ema_alpha": 1.0,
    "eat_warmup_samples": 1,
    "eat_ema_variance_threshold": 1e-4,
    "eat_level_threshold_nats": 0.1,
    "confirm_sentence_ends": 1,
}


@pytest.mark.parametrize("seed", range(2))
def test_as_many_requests_as_an_attempt_needs_prove_a_rule_on_traffic_that_settles(seed: int) -> None:
    result = found(BASE, EASY.episodes(random.Random(seed), fewest(1, 0.02)), GOAL)
    rule = result["rule"]
    assert result["requests"] == fewest(1, 0.02)
    assert set(rule["entropy"]) == set(CHOSEN)
    assert rule["floor_tokens"] >= 256
    assert rule["bound"] <= 0.02
    assert rule["saved"] > 0.1
    fresh = judged(BASE, EASY.episodes(random.Random(2), 2000), rule["entropy"], rule["floor_tokens"])
    assert fresh["harmful"] <= 0.02 * fresh["requests"]
    assert sum(eat_bin["requests"] for eat_bin in rule["reference"]) == pytest.approx(result["requests"], abs=5)


@pytest.mark.parametrize(
    ("traffic", "seed", "count", "why"),
    [
        (MISLED, 4, fewest(1, 0.02), r"EAT < .* nats.* may lose .* %, more than the allowed 2\.00 %"),
        (MISLED, 1, fewest(1, 0.02), NOTHING),
        (replace(EASY, think_tokens=50.0), 1, fewest(1, 0.02), NOTHING),
        (
            ALIKE,
            1,
            1000,
            "only 0.0 % of the requests have another trial answer than the request before",
        ),
    ],
    ids=["misled, seen too late", "misled", "short", "answers that begin alike"],
)
def test_nothing_is_proved(traffic: Traffic, seed: int, count: int, why: str) -> None:
    result = found(BASE, traffic.episodes(random.Random(seed), count), GOAL)
    assert "rule" not in result
    assert re.match(why, result["why"])
    assert result.get("anew", False) == (traffic is ALIKE), "once a prefix is set, earlier probes show nothing"


@pytest.mark.parametrize(
    ("count", "unjudged", "max_loss", "missing"),
    [(fewest(1, 0.02) - 1, 0, 0.02, 1), (fewest(1, 0.02), 3, 0.02, 3), (fewest(1, 0.4), 0, 0.4, 4), (19, 0, 1.0, 1)],
)
def test_too_few_requests_for_a_proof_are_no_attempt(count: int, unjudged: int, max_loss: float, missing: int) -> None:
    """Each attempt takes its share of the confidence. Ten requests are needed in each half, whatever may be lost."""
    rows = EASY.episodes(random.Random(1), count)
    for number, row in enumerate(rows[:unjudged]):
        rows[number] = row._replace(samples=tuple(sample._replace(same_answer=0) for sample in row.samples))
    assert found(BASE, rows, Goal(max_loss, attempt=1)) == {"requests": count - unjudged, "missing": missing}


def test_answers_that_begin_alike_would_seem_never_to_change() -> None:
    differing = replace(ALIKE, differs=True)
    assert found(BASE, differing.episodes(random.Random(1), 1000), GOAL)["rule"]["saved"] > 0.5


def episode(*probes: tuple[int, float, int], natural: int = 700, unread: tuple[int, ...] = ()) -> Episode:
    """Return a request with probes, each with its place, EAT, and number of probes in a row with its trial answer."""
    samples = [Sample(place, place, eat, 2, same, False, place not in unread, True) for place, eat, same in probes]
    return Episode("r", natural, tuple(samples))


@pytest.mark.parametrize(
    ("one", "floor", "more", "harmful", "first"),
    [
        (episode((300, 0.05, 1), (400, 0.05, 2)), 256, {}, 0, [0.05]),
        (episode((300, 0.05, 1), (400, 0.05, 1)), 256, {}, 1, [0.05]),
        (episode((300, 0.5, 1), (400, 0.05, 1)), 256, {}, 0, [0.5]),
        (episode((300, 0.05, 1), (400, 0.05, 1)), 256, {"confirm_sentence_ends": 2}, 0, [0.05]),
        (episode((100, 0.05, 1), (400, 0.5, 1)), 256, {}, 0, [0.5]),
        (episode((100, 0.05, 1), (400, 0.05, 1)), 0, {}, 1, [0.05]),
        (episode((300, 0.05, 1), (400, 0.05, 1), unread=(300,)), 256, {}, 0, [0.05]),
        (episode((300, 0.5, 1), (400, 0.5, 1)), 256, {}, 0, [0.5]),
    ],
    ids=["stays", "changes", "later", "in a row", "before the floor", "no floor", "unread", "never"],
)
def test_an_answer_is_lost_if_it_changes_after_the_stop(
    one: Episode, floor: int, more: dict[str, Any], harmful: int, first: list[float]
) -> None:
    base = Policy.model_validate({"entropy": {"eat_probe_interval_tokens": GAP_TOKENS}})
    result = judged(base, [one], LEVEL | more, floor)
    assert (result["requests"], result["harmful"], result["first"]) == (1, harmful, pytest.approx(first))


@pytest.mark.parametrize(
    ("scheduler", "harmful"),
    [
        ({"empty_answer_extension_tokens": 100}, 0),
        ({"empty_answer_extension_tokens": 100, "enabled": False}, 1),
        ({"empty_answer_extension_tokens": 0}, 1),
    ],
)
def test_where_an_empty_answer_keeps_thinking_going_no_answer_is_lost(scheduler: dict[str, Any], harmful: int) -> None:
    one = episode((300, 0.05, 1), (400, 0.05, 2))
    empty = one._replace(samples=(one.samples[0]._replace(is_empty=True), one.samples[1]))
    base = Policy.model_validate({"scheduler": scheduler})
    assert judged(base, [empty], LEVEL, 256)["harmful"] == harmful
    assert judged(base, [one], LEVEL, 256)["harmful"] == 0


def test_of_several_episodes_of_a_request_the_newest_counts() -> None:
    """A request may close on two replicas, one of which has lost its stream."""
    kept, lost = episode((300, 0.05, 1), (400, 0.05, 2)), episode((300, 0.05, 1), (400, 0.05, 1))
    for one, other, harmful in ((kept, lost, 1), (lost, kept, 0)):
        task = {
            "base": BASE.model_dump_json(),
            "episodes": [one.to_json(), other.to_json()],
            "rule": {"entropy": LEVEL, "floor_tokens": 256},
        }
        assert (work(task)["requests"], work(task)["harmful"]) == (1, harmful)


def calibrated_by(code: str, requests: int, max_loss: float) -> subprocess.CompletedProcess[str]:
    """Calibrate so many requests in a process that runs this code."""
    episodes = [each.to_json() for each in EASY.episodes(random.Random(1), requests)]
    task = {"base": BASE.model_dump_json(), "max_loss": max_loss, "attempt": 1}
    lines = "\n".join([json.dumps(task), *episodes])
    return subprocess.run([sys.executable, "-c", code], input=lines, capture_output=True, text=True, check=False)


def test_a_calibration_that_needs_too_much_memory_fails_by_itself() -> None:
    code = "from meridian_control.offline import self_calibration as it; it.MOST_BYTES = 30_000_000; it.run()"
    done = calibrated_by(code, 1000, 0.02)
    assert (done.returncode, done.stdout) == (1, "")
    assert "MemoryError" in done.stderr.splitlines()[-1]


def test_a_control_plane_needs_no_scipy_for_it() -> None:
    code = "import sys; sys.modules['scipy'] = None; from meridian_control.offline.self_calibration import run; run()"
    done = calibrated_by(code, 60, 0.3)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rule"]["saved"] > 0
