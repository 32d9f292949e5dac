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


def entropy(**fields: Any) -> dict[str, Any]:
    return {"entropy": fields}


def soft(**fields: Any) -> dict[str, Any]:
    return {"scheduler": {"soft_think_tokens": 600, "soft_close_rank": 9, **fields}, "entropy": {"enabled": False}}


BOUND = {"eat_ema_variance": 0.0, "eat_ema_nats": 0.0}
RANKS = entropy(rank_conditions=[{"max_ranks": [5]}])
# Where a request stays untouched, whatever the rule is.
ELSEWHERE: list[dict[str, Any]] = [{"think_tokens": 511}, {"phase": OUTPUT}, {"end_decided": True}, {"live": False}]
ENDS: list[tuple[dict[str, Any], dict[str, Any], int | None]] = [
    ({}, CONVERGED, EAT),
    *(({}, CONVERGED | changed, None) for changed in (*ELSEWHERE, {"phase": PROMPT}, {"eat_count": 19})),
    *(({}, CONVERGED | changed, None) for changed in ({"eat_ema_variance": 1e-4}, {"eat_ema_nats": 0.1})),
    # Each field of the EAT rule has an effect.
    ({}, CONVERGED | {"think_tokens": 100}, None),
    ({"scheduler": {"min_think_tokens": 100}}, CONVERGED | {"think_tokens": 100}, EAT),
    ({}, CONVERGED | {"eat_count": 8}, None),
    (entropy(eat_warmup_samples=8), CONVERGED | {"eat_count": 8}, EAT),
    (entropy(eat_ema_variance_threshold=0.5), CONVERGED | {"eat_ema_variance": 0.4}, EAT),
    (entropy(eat_level_threshold_nats=2.0), CONVERGED | {"eat_ema_nats": 1.9}, EAT),
    # Thresholds of zero never fire, and nothing fires without a sample.
    (entropy(eat_ema_variance_threshold=0), CONVERGED | BOUND, None),
    (entropy(eat_level_threshold_nats=0), CONVERGED | BOUND, None),
    (entropy(eat_warmup_samples=1), thinking(think_tokens=9999), None),
    ({}, DERAILED, RPDI),
    *(({}, DERAILED | changed, None) for changed in (*ELSEWHERE, {"boundary_now": False})),
    *(
        ({}, DERAILED | changed, None)
        for changed in ({"entropy_window_sum": 2.0 * WINDOW}, {"entropy_count": WINDOW - 1})
    ),
    *((entropy(rpdi_threshold=threshold), DERAILED, end) for threshold, end in ((3.0, None), (2.99, RPDI), (0, None))),
    (RANKS, ranked(1), RANK),
    *((RANKS, ranked(1, **changed), None) for changed in (*ELSEWHERE, {"boundary_now": False})),
    # The rank rule is off unless the policy names conditions.
    ({}, ranked(1), None),
    (soft(), ranked(9, think_tokens=600), SOFT),
    *((soft(), row, None) for row in (ranked(10, think_tokens=600), ranked(9, think_tokens=599))),
    (soft(), ranked(9, think_tokens=600, boundary_now=False), None),
    (soft(enabled=False), ranked(9, think_tokens=600), None),
    *((entropy(enabled=False), row, None) for row in (CONVERGED, DERAILED)),
]


@pytest.mark.parametrize(("sections", "row", "end"), ENDS)
def test_where_each_rule_ends_thinking(sections: dict[str, Any], row: dict[str, Any], end: int | None) -> None:
    assert ends(policy(**sections), table(row)) == ([] if end is None else [(0, end)])


def test_what_is_off_reads_no_signals_and_asks_for_no_probes() -> None:
    assert [needs_signals(policy(**soft(enabled=enabled))) for enabled in (True, False)] == [True, False]
    assert probes_due(policy(entropy={"enabled": False}), table(CONVERGED)).tolist() == []


@pytest.mark.parametrize("ranks", PUBLISHED)
def test_each_rank_condition_fires_at_its_bound_and_alone(ranks: list[int]) -> None:
    """Each published condition (arXiv 2508.17627) fires at its bound, but neither above the bound nor with one sentence
    end too few."""
    only = policy(entropy={"rpdi_threshold": 0, "rank_conditions": [{"max_ranks": ranks}]})
    assert ends(only, table(ranked(*ranks))) == [(0, RANK)]
    for place in range(len(ranks)):
        above = [rank + (k == place) for k, rank in enumerate(ranks)]
        assert ends(only, table(ranked(*above))) == []
    assert ends(only, table(ranked(*ranks[:-1]))) == []


def test_the_table_keeps_what_any_policy_asks_for() -> None:
    confirm, ranks = EntropyPolicy.model_fields["confirm_sentence_ends"], RankCondition.model_fields["max_ranks"]
    (most,) = (limit.le for limit in confirm.metadata if hasattr(limit, "le"))
    (deepest,) = (limit.max_length for limit in ranks.metadata if hasattr(limit, "max_length"))
    assert (most, deepest + most - 1) == (CONFIRM_HISTORY, RANK_HISTORY)


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
    on, soft = ACTIVE | {"rank_conditions": [{"max_ranks": [5]}]}, {"soft_think_tokens": 512}
    every: dict[int, dict[str, Any]] = {EAT: CONVERGED | DERAILED | ranked(1), RANK: DERAILED | ranked(1)}
    for end, row in every.items():
        assert ends(policy(entropy=on, scheduler=soft), table(row)) == [(0, end)]
    assert ends(policy(entropy=ACTIVE, scheduler=soft), table(DERAILED | ranked(1))) == [(0, RPDI)]
    assert ends(policy(entropy=ACTIVE, scheduler=soft), table(ranked(1))) == [(0, SOFT)]
    # Each request ends once.
    four = table(DERAILED | CONVERGED, DERAILED, thinking(), CONVERGED)
    assert ends(policy(entropy=ACTIVE), four) == [(0, EAT), (1, RPDI), (3, EAT)]


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
        {"probed_tokens": 537},
        {"live": False},
    ],
)
def test_who_is_not_probed(changed: dict[str, Any]) -> None:
    row = thinking(think_tokens=600, probed_tokens=536)
    assert due(row)
    assert not due(row | changed)
