"""Rules that end thinking: each rule at its threshold, each policy field's effect, and the order of the rules."""

from __future__ import annotations

from typing import Any

import pytest
from meridian.v1 import agent_pb2

from meridian_control.capabilities.entropy.probes import probes_due
from meridian_control.capabilities.entropy.rule import ends
from meridian_control.common.opened_request import OpenedRequest
from meridian_control.common.table_columns import CONFIRM_HISTORY, RANK_HISTORY
from meridian_control.engine.request_table import OUTPUT, PROMPT, THINK
from meridian_control.policy.effects import cap, needs_signals
from meridian_control.policy.schema import EntropyPolicy, RankCondition, SchedulerPolicy
from tests.fakes.tables import WINDOW, policy, table, thinking, tokens

EAT, RPDI = agent_pb2.FORCE_REASON_EAT, agent_pb2.FORCE_REASON_RPDI
RANK, SOFT = agent_pb2.FORCE_REASON_RANK, agent_pb2.FORCE_REASON_SOFT_CLOSE

ACTIVE = {"shadow": False}
# A request for which EAT fires under the defaults, with exactly the evidence that is needed.
CONVERGED = thinking(think_tokens=512, eat_count=20, eat_ema_nats=0.09, eat_ema_variance=0.9e-4)
# A request with local mean 3 and global mean 1, whose RPDI is 3.
DERAILED = thinking(
    think_tokens=512, entropy_count=100, entropy_sum=100.0, entropy_window_sum=3.0 * WINDOW, boundary_now=True
)


@pytest.mark.parametrize(
    ("own", "limit", "expected"), [(None, 100, 100), (5, 100, 5), (0, 100, 0), (500, 100, 100), (100, 100, 100)]
)
def test_the_cap_is_the_requests_wish_clamped_by_policy(own: int | None, limit: int, expected: int) -> None:
    opened = OpenedRequest(agent_pb2.RequestOpened(max_think_tokens=own))
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
        ("entropy", {"eat_warmup_samples": 8}, {"eat_count": 8}),
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
    assert ends(policy(entropy={"eat_warmup_samples": 1}), table(thinking(think_tokens=9999))) == []


# ------------------------------------------------------------------------------------------------------------ RPDI


def test_rpdi_fires() -> None:
    assert ends(policy(), table(DERAILED)) == [(0, RPDI)]


@pytest.mark.parametrize(
    "changed",
    [
        {"entropy_window_sum": 2.0 * WINDOW},
        {"entropy_count": WINDOW - 1},
        {"think_tokens": 511},
        {"boundary_now": False},
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
    """The table holds the window; test_session_rules tests how the window follows the policy."""
    rows = [DERAILED | {"entropy_count": 8, "entropy_sum": 8.0, "entropy_window_sum": 24.0}]
    assert ends(policy(), table(*rows, window=8)) == [(0, RPDI)]
    assert ends(policy(), table(*rows, window=16)) == []


# ------------------------------------------------------------------------------------------------- rank, soft close

PUBLISHED = [[5], [10, 50, 100, 1000], [20, 20, 20], [50, 50, 50, 50, 50, 50]]


def ranked(*newest_first: int, **columns: Any) -> dict[str, Any]:
    """Return a request whose end marker had these ranks at its sentence ends."""
    history = [*newest_first, *[0] * (RANK_HISTORY - len(newest_first))]
    row = {"think_tokens": 512, "boundary_ranks": history, "boundary_count": len(newest_first), "boundary_now": True}
    return thinking(**row | columns)


@pytest.mark.parametrize(
    ("ranks", "index"),
    [
        ((5,), 0),
        ((10, 50, 100, 1000), 1),
        ((20, 20, 20), 2),
        ((50,) * 6, 3),
    ],
)
def test_each_rank_condition_fires_at_its_bound_and_alone(ranks: tuple[int, ...], index: int) -> None:
    """Each published condition (arXiv 2508.17627) fires at its bound, but neither above the bound nor with one sentence
    end too few."""
    only = policy(entropy={"rpdi_threshold": 0, "rank_conditions": [{"max_ranks": PUBLISHED[index]}]})
    assert ends(only, table(ranked(*ranks))) == [(0, RANK)]
    for place in range(len(ranks)):
        above = [rank + (k == place) for k, rank in enumerate(ranks)]
        assert ends(only, table(ranked(*above))) == []
    assert ends(only, table(ranked(*ranks[:-1]))) == []


@pytest.mark.parametrize(
    "changed", [{"boundary_now": False}, {"think_tokens": 511}, {"phase": OUTPUT}, {"live": False}]
)
def test_the_rank_rule_waits_for_a_sentence_end_past_the_floor(changed: dict[str, Any]) -> None:
    on = policy(entropy={"rank_conditions": [{"max_ranks": [5]}]})
    assert ends(on, table(ranked(1, **changed))) == []
    assert ends(policy(), table(ranked(1))) == [], "the rank rule is off unless the policy names conditions"


def test_the_table_keeps_what_any_policy_asks_for() -> None:
    confirm, ranks = EntropyPolicy.model_fields["confirm_sentence_ends"], RankCondition.model_fields["max_ranks"]
    (most,) = (limit.le for limit in confirm.metadata if hasattr(limit, "le"))
    (deepest,) = (limit.max_length for limit in ranks.metadata if hasattr(limit, "max_length"))
    assert (most, deepest + most - 1) == (CONFIRM_HISTORY, RANK_HISTORY)


def test_soft_close_fires_past_its_budget_where_the_end_marker_is_likely() -> None:
    soft = policy(scheduler={"soft_think_tokens": 600, "soft_close_rank": 9}, entropy={"enabled": False})
    assert ends(soft, table(ranked(9, think_tokens=600))) == [(0, SOFT)]
    for row in (
        ranked(10, think_tokens=600),
        ranked(9, think_tokens=599),
        ranked(9, think_tokens=600, boundary_now=False),
    ):
        assert ends(soft, table(row)) == []
    off = policy(scheduler={"enabled": False, "soft_think_tokens": 600}, entropy={"enabled": False})
    assert ends(off, table(ranked(9, think_tokens=600))) == []
    assert (needs_signals(soft), needs_signals(off)) == (True, False)


def test_ranks_are_those_the_next_token_was_drawn_under() -> None:
    rows = table(thinking())
    for flags, rank in ((32, 7), (0, 3), (0, 9), (32 | 64, 8), (32, 2), (0, 4)):
        rows.add_tokens(tokens([(0, THINK, flags, 1.0, rank)]))
    assert rows.boundary_ranks[0, :3].tolist() == [4, 2, 3]
    assert (rows.boundary_count[0], rows.boundary_now[0]) == (3, True)
    rows.add_tokens(tokens([(0, THINK, 0, 1.0, 5)]))
    assert not rows.boundary_now[0]


# --------------------------------------------------------------------------------------------------- rules together


def test_precedence_over_all_rules() -> None:
    every = CONVERGED | DERAILED | ranked(1)
    on = ACTIVE | {"rank_conditions": [{"max_ranks": [5]}]}
    soft = {"soft_think_tokens": 512}
    assert ends(policy(entropy=on, scheduler=soft), table(every)) == [(0, EAT)]
    assert ends(policy(entropy=on, scheduler=soft), table(DERAILED | ranked(1))) == [(0, RANK)]
    assert ends(policy(entropy=ACTIVE, scheduler=soft), table(DERAILED | ranked(1))) == [(0, RPDI)]
    assert ends(policy(entropy=ACTIVE, scheduler=soft), table(ranked(1))) == [(0, SOFT)]


def test_a_rule_in_shadow_fires_once_and_keeps_no_other_from_firing() -> None:
    every = CONVERGED | DERAILED | ranked(1)
    soft = {"soft_think_tokens": 512}
    rows = table(every)
    assert ends(policy(scheduler=soft), rows) == [(0, EAT), (0, RPDI), (0, SOFT)]
    rows.shadow_decided[0] = 1 << EAT
    assert ends(policy(scheduler=soft), rows) == [(0, RPDI), (0, SOFT)]
    rows.shadow_decided[0] |= 1 << RPDI
    assert ends(policy(scheduler=soft), rows) == [(0, SOFT)]
    rows.end_decided[0] = SOFT
    assert ends(policy(scheduler=soft), rows) == []
    assert ends(policy(entropy=ACTIVE, scheduler={**soft, "shadow": True}), table(every)) == [(0, EAT)]


def test_what_eat_in_shadow_has_ended_is_not_probed_any_more() -> None:
    assert due(thinking(think_tokens=600, shadow_decided=1 << RPDI))
    assert not due(thinking(think_tokens=600, shadow_decided=1 << EAT))


def test_eat_speaks_before_rpdi_and_each_request_ends_once() -> None:
    both = DERAILED | CONVERGED
    assert ends(policy(entropy=ACTIVE), table(both, DERAILED, thinking(), CONVERGED)) == [(0, EAT), (3, EAT), (1, RPDI)]


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
        "entropy": {"eat_warmup_samples": 8, "eat_probe_interval_tokens": 100},
    }
    assert not due(thinking(think_tokens=3199), **fields)
    assert due(thinking(think_tokens=3200), **fields)
    fields["entropy"]["eat_probe_interval_tokens"] = 101
    assert due(thinking(think_tokens=3192), **fields)
    fields["entropy"]["eat_warmup_samples"] = 4
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
