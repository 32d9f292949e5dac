"""Measurements by which a rollout is judged, from engines as FleetService shows them: counters that grow and start
over."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pytest
from meridian.v1 import fleet_pb2

from meridian_control.common.histogram import time_histogram
from meridian_control.fleet.departed import FORGET_AFTER_S
from meridian_control.rollout.plan import Plan
from meridian_control.rollout.sampler import LOST_S, Sampler
from meridian_control.rollout.state import By, Sample
from meridian_control.rollout.transitions import begin

NOW = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)
ROLLOUT = begin(1, Plan.model_validate({"step": [{"engine_labels": {"pool": "canary"}}]}), (1, 2), By(NOW))
UP, DOWN = fleet_pb2.CONNECTION_STATE_CONNECTED, fleet_pb2.CONNECTION_STATE_DISCONNECTED
LEASE_S = 30.0


def engine(name: str, acked: int = 1, tokens: int = 0, since_s: float = -100, **fields: Any) -> fleet_pb2.Engine:
    """Return an engine that takes 20 ms per token and finishes an answer with every token, every second answer
    empty."""
    itl = time_histogram()
    itl.add(np.full(tokens, 0.02))
    made = fleet_pb2.Engine(
        **{"engine_id": name, "state": UP, "revision": acked, "acked_revision": acked, **fields},
        output_itl=itl.message(),
        ttot=time_histogram().message(),
        answers={"answered_after_natural": tokens - tokens // 2, "empty_after_forced": tokens // 2, "unended": 9},
    )
    made.connect_time.FromDatetime(NOW + timedelta(seconds=since_s))
    return made


class Looks:
    """A sampler that takes one sample a second."""

    def __init__(self, lease_s: float = LEASE_S) -> None:
        self.sampler, self.now, self._before, self.lease_s = Sampler(), NOW, NOW, lease_s

    def at(self, *engines: fleet_pb2.Engine) -> Sample:
        elapsed_s = (self.now - self._before).total_seconds()
        found = self.sampler.sample(engines, ROLLOUT, self.lease_s, self.now, elapsed_s)
        self._before = self.now
        self.now += timedelta(seconds=1)
        return found


def counted(sample: Sample) -> tuple[int, int]:
    return sum(sample.candidate.output_itl), sum(sample.stable.output_itl)


def test_what_is_new_belongs_to_the_policy_applied() -> None:
    looks = Looks()
    assert counted(looks.at(engine("a", 2, 50), engine("b", 1, 70))) == (0, 0), "earlier tokens do not count"
    sample = looks.at(engine("a", 2, 60), engine("b", 1, 73))
    assert counted(sample) == (10, 3)
    assert (sample.candidate.answers, sample.candidate.empty, sample.candidate.reentries) == (10, 5, 0)
    assert (sample.candidate_engines, sample.other_engines) == (1, 1)
    assert counted(looks.at(engine("a", 2, 60), engine("b", 1, 73))) == (0, 0)


def test_an_engine_that_changes_policy_counts_from_the_next_look_on() -> None:
    looks = Looks()
    looks.at(engine("a", 1, 10))
    assert counted(looks.at(engine("a", 2, 20))) == (0, 0)
    assert counted(looks.at(engine("a", 2, 25))) == (5, 0)
    assert counted(looks.at(engine("a", 0, 25), engine("older", 0, 5))) == (0, 0)


# Freezes of an operator, which end; one that has ended, which the agent has not confirmed; and one of the environment.
OPERATOR, THAWING, ENVIRONMENT = (
    fleet_pb2.EngineFreeze(freeze_ids=[7], confirmed=True),
    fleet_pb2.EngineFreeze(),
    fleet_pb2.EngineFreeze(confirmed=True),
)


@pytest.mark.parametrize("freeze", [OPERATOR, THAWING, ENVIRONMENT])
def test_a_frozen_engine_runs_as_stock_vllm_so_its_counts_are_of_no_policy(freeze: fleet_pb2.EngineFreeze) -> None:
    looks = Looks()
    looks.at(engine("a", 2, 50), engine("b", 1, 70))
    for tokens in (60, 70):
        assert counted(looks.at(engine("a", 2, tokens, freeze=freeze), engine("b", 1, tokens, freeze=freeze))) == (0, 0)
    assert counted(looks.at(engine("a", 2, 80), engine("b", 1, 80))) == (0, 0), "the thaw came between the looks"
    assert counted(looks.at(engine("a", 2, 85), engine("b", 1, 81))) == (5, 1)


@pytest.mark.parametrize(
    ("freezes", "expected"),
    [
        ({"a": OPERATOR}, (1, 2, 1)),
        ({"a": THAWING}, (1, 2, 1)),
        ({"a": ENVIRONMENT}, (0, 1, 1)),
        ({"a": ENVIRONMENT, "b": ENVIRONMENT}, (2, 0, 1)),
        ({"c": OPERATOR}, (0, 2, 1)),
        ({"c": ENVIRONMENT}, (0, 2, 0)),
    ],
)
def test_a_step_waits_for_frozen_engines_that_thaw(
    freezes: dict[str, fleet_pb2.EngineFreeze], expected: tuple[int, int, int]
) -> None:
    """An engine that its environment freezes does not thaw, so nothing waits for it beside other engines."""
    acked = {"a": 2, "b": 2, "c": 1}
    sample = Looks().at(*(engine(name, acked[name], freeze=freezes.get(name)) for name in acked))
    assert (sample.frozen, sample.candidate_engines, sample.stable_engines) == expected


def test_counters_that_start_over() -> None:
    looks = Looks()
    looks.at(engine("a", 2, 50))
    assert counted(looks.at(engine("a", 2, 4, since_s=0.5))) == (4, 0), "all tokens came since the last sample"
    assert counted(looks.at(engine("a", 2, 9, since_s=0.5), engine("new", 1, 3, since_s=1.5))) == (5, 3)
    assert counted(looks.at(engine("found", 1, 30, since_s=-50))) == (0, 0), "the engine is not new"


def test_other_buckets_are_left_out() -> None:
    looks = Looks()
    looks.at(engine("a", 2, 1))
    other = engine("a", 2, 9)
    other.output_itl.counts.append(7)
    assert counted(looks.at(other))[0] <= 0


def test_refused_and_pending() -> None:
    sample = Looks().at(
        engine("applied", 2),
        engine("asked", 1, revision=2),
        engine("not-offered", 1, labels={"pool": "canary"}),
        engine("not-offered-and-left", 1, labels={"pool": "canary"}, state=DOWN, lost=True),
        engine("refused", 1, revision=2, nack_error="no such parser"),
        engine("refused-and-left", 1, revision=2, nack_error="no such parser", state=DOWN),
        engine("refused-the-old", 1, nack_error="no such parser"),
        engine("off", 1, revision=2, fault="KeyError"),
        engine("other"),
        engine("refused-both", 0, revision=1, nack_error="no such parser"),
    )
    assert (sample.candidate_engines, sample.other_engines, sample.pending, sample.nacks) == (1, 7, 2, 2)
    assert sample.stable_engines == 5
    assert sample.missing == 0
    assert sample.degraded == 1, "an agent that is off gets no settings, so nothing waits for it"


def test_degraded_is_past_the_lease_or_switched_off() -> None:
    looks = Looks()
    lost = {"state": DOWN, "lost": True}
    gone = [engine("gone", 2, **lost), engine("asked", 1, revision=2, **lost), engine("old", 1, **lost)]
    moved = [engine("moved", 2, **lost), engine("moved", 2), engine("shut-down", 2, state=DOWN)]

    def missing_and_degraded(*engines: fleet_pb2.Engine) -> tuple[int, int]:
        sample = looks.at(*engines)
        return sample.missing, sample.degraded

    assert missing_and_degraded(*gone, *moved, engine("off", 2, fault="KeyError")) == (2, 1)
    looks.now += timedelta(seconds=LEASE_S - 1)
    assert missing_and_degraded(*gone, *moved) == (2, 0)
    assert missing_and_degraded(*gone, *moved) == (0, 2)
    assert missing_and_degraded(engine("gone", 2), gone[1]) == (0, 1)
    assert missing_and_degraded(gone[0]) == (1, 0), "the engine is missing once more"


def test_an_engine_with_a_long_lease_is_degraded_before_the_fleet_forgets_it() -> None:
    looks, gone = Looks(lease_s=86_400.0), engine("gone", 2, state=DOWN, lost=True)
    assert looks.at(gone).missing == 1
    looks.now += timedelta(seconds=LOST_S)
    assert looks.at(gone).degraded == 1
    assert LOST_S < FORGET_AFTER_S
