"""Who has thought enough: each rule at its threshold, each policy field's effect, and which rule speaks first."""

from __future__ import annotations

from typing import Any

import pytest
from meridian.v1 import agent_pb2

from meridian_control.policy import SchedulerPolicy
from meridian_control.requests import OUTPUT, PROMPT
from meridian_control.termination import cap, ends, probes_due
from tests.fakes.tables import WINDOW, policy, table, thinking

EAT, RPDI = agent_pb2.FORCE_REASON_EAT, agent_pb2.FORCE_REASON_RPDI

# Fires under the defaults, with exactly the evidence that is needed.
CONVERGED = thinking(think_tokens=512, eat_count=20, eat_ema_nats=0.09, eat_ema_variance=0.9e-4)
# Local mean 3, global mean 1: RPDI is 3.
DERAILED = thinking(think_tokens=512, entropy_count=100, entropy_sum=100.0, entropy_window_sum=3.0 * WINDOW)


@pytest.mark.parametrize(
    ("own", "limit", "expected"), [(None, 100, 100), (5, 100, 5), (0, 100, 0), (500, 100, 100), (100, 100, 100)]
)
def test_the_cap_is_the_requests_wish_clamped_by_policy(own: int | None, limit: int, expected: int) -> None:
    opened = agent_pb2.RequestOpened(max_think_tokens=own)
    assert cap(SchedulerPolicy(max_think_tokens=limit, min_think_tokens=0), opened) == expected


# ------------------------------------------------------------------------------------------------------------- EAT


def test_eat_fires() -> None:
    assert ends(policy(), table(CONVERGED)) == [(0, EAT)]


@pytest.mark.parametrize(
    "changed",
    [
        {"think_tokens": 511},
        {"eat_count": 19},
        {"eat_ema_variance": 1e-4},
        {"eat_ema_nats": 0.1},
        {"phase": OUTPUT},
        {"phase": PROMPT},
        {"end_decided": True},
        {"live": False},
    ],
)
def test_eat_does_not_fire(changed: dict[str, Any]) -> None:
    assert ends(policy(), table(CONVERGED | changed)) == []


@pytest.mark.parametrize(
    ("section", "fields", "row"),
    [
        ("scheduler", {"min_think_tokens": 100}, {"think_tokens": 100}),
        ("entropy", {"ema_alpha": 0.5}, {"eat_count": 8}),
        ("entropy", {"eat_ema_variance_threshold": 0.5}, {"eat_ema_variance": 0.4}),
        ("entropy", {"eat_level_threshold_nats": 2.0}, {"eat_ema_nats": 1.9}),
    ],
)
def test_each_field_of_the_eat_rule_has_an_effect(section: str, fields: dict[str, Any], row: dict[str, Any]) -> None:
    rows = table(CONVERGED | row)
    assert ends(policy(), rows) == []
    assert ends(policy(**{section: fields}), rows) == [(0, EAT)]


def test_thresholds_of_zero_never_fire() -> None:
    flat = table(CONVERGED | {"eat_ema_variance": 0.0, "eat_ema_nats": 0.0})
    assert ends(policy(entropy={"eat_ema_variance_threshold": 0}), flat) == []
    assert ends(policy(entropy={"eat_level_threshold_nats": 0}), flat) == []


def test_no_sample_no_end() -> None:
    assert ends(policy(entropy={"ema_alpha": 1}), table(thinking(think_tokens=9999))) == []


# ------------------------------------------------------------------------------------------------------------ RPDI


def test_rpdi_fires() -> None:
    assert ends(policy(), table(DERAILED)) == [(0, RPDI)]


@pytest.mark.parametrize(
    "changed",
    [
        {"entropy_window_sum": 2.0 * WINDOW},
        {"entropy_count": WINDOW - 1},
        {"think_tokens": 511},
        {"phase": OUTPUT},
        {"end_decided": True},
        {"live": False},
    ],
)
def test_rpdi_does_not_fire(changed: dict[str, Any]) -> None:
    assert ends(policy(), table(DERAILED | changed)) == []


def test_the_rpdi_threshold_has_an_effect_and_zero_switches_the_rule_off() -> None:
    rows = table(DERAILED)
    assert ends(policy(entropy={"rpdi_threshold": 3.0}), rows) == []
    assert ends(policy(entropy={"rpdi_threshold": 2.99}), rows) == [(0, RPDI)]
    assert ends(policy(entropy={"rpdi_threshold": 0}), rows) == []


def test_the_rpdi_window_has_an_effect() -> None:
    """The window is the table's: see test_session for how it follows the policy."""
    rows = [{"entropy_count": 8, "entropy_sum": 8.0, "entropy_window_sum": 24.0, "think_tokens": 512}]
    assert ends(policy(), table(*rows, window=8)) == [(0, RPDI)]
    assert ends(policy(), table(*rows, window=16)) == []


# ------------------------------------------------------------------------------------------------------------- both


def test_eat_speaks_before_rpdi_and_each_request_ends_once() -> None:
    both = DERAILED | CONVERGED
    assert ends(policy(), table(both, DERAILED, thinking(), CONVERGED)) == [(0, EAT), (3, EAT), (1, RPDI)]


def test_entropy_off_ends_nothing_and_probes_nothing() -> None:
    off = policy(entropy={"enabled": False})
    assert ends(off, table(CONVERGED, DERAILED)) == []
    assert probes_due(off, table(CONVERGED)).tolist() == []


# ----------------------------------------------------------------------------------------------------------- probes


def due(row: dict[str, Any], **sections: dict[str, Any]) -> bool:
    return list(probes_due(policy(**sections), table(row))) == [0]


def test_probes_begin_early_enough_to_be_warm_at_the_floor() -> None:
    fields: dict[str, dict[str, Any]] = {
        "scheduler": {"min_think_tokens": 4000},
        "entropy": {"ema_alpha": 0.5, "eat_probe_interval_tokens": 100},
    }
    assert not due(thinking(think_tokens=3199), **fields)
    assert due(thinking(think_tokens=3200), **fields)
    fields["entropy"]["eat_probe_interval_tokens"] = 101
    assert due(thinking(think_tokens=3192), **fields)
    fields["entropy"]["ema_alpha"] = 1.0
    assert not due(thinking(think_tokens=3192), **fields)
    assert due(thinking(think_tokens=3596), **fields)


@pytest.mark.parametrize(
    "changed",
    [
        {"think_tokens": 0},
        {"phase": OUTPUT},
        {"end_decided": True},
        {"probe_open": True},
        {"preempted": True},
        {"next_probe_tokens": 601},
        {"live": False},
    ],
)
def test_who_is_not_probed(changed: dict[str, Any]) -> None:
    row = thinking(think_tokens=600, next_probe_tokens=600)
    assert due(row)
    assert not due(row | changed)
