"""The give-up rule: where it fires, how its shadow works, and what the control group and `explain` say about it."""

from __future__ import annotations

from typing import Any

import pytest
from meridian.v1 import agent_pb2

from meridian_control.capabilities.entropy.probes import probes_due
from meridian_control.capabilities.entropy.rule import ends
from meridian_control.journal.messages import decision_message
from meridian_control.policy.effects import hold_ms
from tests.fakes.tables import policy, table, thinking
from tests.unit.control.capabilities.control_group.test_stream import CONTROL, TREATED, counts
from tests.unit.sessions import CALIBRATED, EARLY, Stream, stream

EAT, RANK, GIVE_UP = agent_pb2.FORCE_REASON_EAT, agent_pb2.FORCE_REASON_RANK, agent_pb2.FORCE_REASON_GIVE_UP
# A request whose EAT was still high at a probe after 2000 thinking tokens.
UNDECIDED = thinking(think_tokens=2003, eat_think_tokens=2000, eat_count=20, eat_ema_nats=1.0, eat_ema_variance=0.2)
RULE = {"shadow": False, "give_up_shadow": False, "give_up_tokens": 2000, "give_up_eat_nats": 1.0}
# The rules of a session: a probe at every second token, and no rule but give-up.
ONLY = CALIBRATED | {"eat_level_threshold_nats": 0.0, "give_up_tokens": 12, "give_up_shadow": False}


# ------------------------------------------------------------------------------------------------------------- the rule


@pytest.mark.parametrize(
    ("fields", "changed", "fires"),
    [
        ({}, {}, True),
        ({"give_up_tokens": 2001}, {}, False),
        ({"give_up_eat_nats": 1.01}, {}, False),
        ({"give_up_tokens": 0}, {}, False),
        ({"enabled": False}, {}, False),
        ({}, {"eat_think_tokens": 1999}, False),
        ({}, {"eat_ema_nats": 0.99}, False),
        ({}, {"eat_count": 19}, False),
        ({}, {"phase": agent_pb2.PHASE_OUTPUT}, False),
        ({}, {"end_decided": EAT}, False),
        ({}, {"live": False}, False),
        ({}, {"own_min_think_tokens": 2004}, False),
        ({"floor": 2003}, {}, True),
        ({"floor": 2004}, {}, False),
    ],
)
def test_where_it_fires(fields: dict[str, Any], changed: dict[str, Any], fires: bool) -> None:
    entropy = RULE | fields
    held = policy(scheduler={"min_think_tokens": entropy.pop("floor", 512)}, entropy=entropy)
    assert ends(held, table(UNDECIDED | changed)) == [(0, GIVE_UP)] * fires


def test_it_comes_after_the_other_entropy_rules_and_before_soft_close() -> None:
    at_end = {"boundary_now": True, "boundary_ranks": [3] + [0] * 10, "boundary_count": 1}
    near = {**at_end, "boundary_ranks": [1] + [0] * 10}
    rows = [UNDECIDED | near, UNDECIDED | at_end, thinking(think_tokens=2003, **at_end)]
    both = policy(entropy=RULE | {"rank_conditions": [{"max_ranks": [2]}]}, scheduler={"soft_think_tokens": 100})
    found = sorted(ends(both, table(*rows)))
    assert found == [(0, RANK), (1, GIVE_UP), (2, agent_pb2.FORCE_REASON_SOFT_CLOSE)]


@pytest.mark.parametrize("shadow", [{"shadow": True}, {"give_up_shadow": True}, {}])
def test_either_shadow_lets_the_request_think_on(shadow: dict[str, bool]) -> None:
    """In shadow the rule fires once per request, and other rules in force still end thinking."""
    made = stream(policy(scheduler=EARLY, entropy=ONLY | shadow))
    made.agent.eat_nats = 1.5
    made.open("a", think=40, answer=1)
    sent = made.step(60)
    assert [(f.reason, f.shadow) for f in sent.forces] == [(GIVE_UP, bool(shadow))]
    assert made.session.totals.ends == ({"give_up_shadowed": 1, "natural": 1} if shadow else {"give_up": 1})


# ------------------------------------------------------------------------------------------------------------- sessions


def test_a_request_whose_answer_is_decided_is_left_alone() -> None:
    """EAT of the first request stays high, EAT of the second falls before the rule begins."""
    made = stream(policy(scheduler=EARLY, entropy=ONLY | {"ema_alpha": 0.8}))
    high = made.open("high", think=60, answer=1, eat_nats=lambda tokens: 1.5)
    made.open("falls", think=60, answer=1, eat_nats=lambda tokens: 1.5 if tokens < 8 else 0.3)
    sent = made.step(80)
    assert [(f.slot, f.reason) for f in sent.forces] == [(high, GIVE_UP)]
    (force,) = made.log.decisions("force")
    assert 12 <= force.signals.eat_think_tokens <= 13, "the first probe from 12 tokens on"
    assert made.session.totals.ends == {"give_up": 1, "natural": 1}


def test_an_override_has_thresholds_of_its_own() -> None:
    late = {"effort": "high", "entropy": {"give_up_tokens": 30}}
    spared = {"tenant": "spared", "entropy": {"give_up_shadow": True}}
    made = stream(policy(scheduler=EARLY, entropy=ONLY, override=[late, spared]))
    made.agent.eat_nats = 1.5
    slots = [made.open("plain"), made.open("late", effort="high"), made.open("spared", tenant="spared")]
    sent = made.step(25)
    assert {(f.slot, f.shadow) for f in sent.forces} == {(slots[0], False), (slots[2], True)}
    assert {(f.slot, f.shadow) for f in made.step(15).forces} == {(slots[1], False)}


def test_without_a_probe_nothing_is_given_up() -> None:
    """High EAT from before the rule's first token does not count, however long the request thinks on."""
    made = stream(policy(scheduler=EARLY, entropy=ONLY | {"eat_level_threshold_nats": 0.01}))
    made.agent.eat_nats = 1.5
    made.open("a")
    made.step(10)
    slot = next(slot for slot, _ in made.session.table.requests())
    assert made.session.table.eat_count[slot] >= 4
    made.apply(policy(scheduler=EARLY, entropy=ONLY | {"eat_probe_interval_tokens": 10_000}))
    assert not made.step(60).forces


def test_what_the_rule_saw_and_compared() -> None:
    made = stream(policy(scheduler=EARLY, entropy=ONLY))
    made.agent.eat_nats = 1.5
    made.open("a")
    made.step(30)
    (force,) = made.log.decisions("force")
    told = decision_message(force)
    assert told.reason == "give_up"
    assert told.signals.eat_think_tokens >= 12
    rows = {c.signal: (c.value, c.operator, c.limit_name, c.limit) for c in told.comparisons}
    assert rows == {
        "think_tokens": (force.signals.think_tokens, ">=", "scheduler.min_think_tokens", 0),
        "eat_think_tokens": (force.signals.eat_think_tokens, ">=", "entropy.give_up_tokens", 12),
        "eat_samples": (force.signals.eat_samples, ">=", "entropy.eat_warmup_samples", 4),
        "eat_ema_nats": (1.5, ">=", "entropy.give_up_eat_nats", 1.0),
    }
    probes = list(made.log.decisions("probe"))
    whys = [compared for probe in probes for compared in decision_message(probe).comparisons]
    assert len(probes) == len(whys) > 3
    seen = sorted(probe.signals.think_tokens for probe in probes)
    interval = "probe before + entropy.eat_probe_interval_tokens"
    wanted = [("entropy.give_up_tokens - warm-up", 4), *((interval, each + 2) for each in seen[:-1])]
    assert sorted((c.limit_name, c.limit) for c in whys) == sorted(wanted)


# --------------------------------------------------------------------------------------------------------------- probes


def test_a_request_is_probed_until_the_rule_has_fired_in_shadow_too() -> None:
    def due(fired: int, **entropy: Any) -> bool:
        rows = table(thinking(think_tokens=4000, shadow_decided=fired))
        return bool(len(probes_due(policy(entropy={"give_up_tokens": 2000} | entropy), rows)))

    assert due(1 << EAT)
    assert due(1 << GIVE_UP)
    assert not due(1 << EAT | 1 << GIVE_UP)
    assert not due(1 << GIVE_UP, eat_level_threshold_nats=0.0)


def test_without_other_rules_on_probes_they_begin_shortly_before_the_rule() -> None:
    """The control group is probed from the floor on, because the probes judge the other rules."""
    only = {"eat_level_threshold_nats": 0.0, "eat_warmup_samples": 4, "eat_probe_interval_tokens": 50}

    def begins(**entropy: Any) -> list[int]:
        rows = [thinking(think_tokens=tokens) for tokens in (400, 1799, 1800)]
        rows.append(thinking(think_tokens=400, control=True))
        asked = policy(entropy=only | {"give_up_tokens": 2000} | entropy)
        return list(probes_due(asked, table(*rows)))

    assert begins() == [2, 3]
    assert begins(eat_level_threshold_nats=0.1) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("entropy", "waits"),
    [
        ({}, True),
        ({"give_up_shadow": True}, False),
        ({"shadow": True}, False),
        ({"give_up_tokens": 0}, False),
        ({"give_up_shadow": True, "eat_level_threshold_nats": 0.1}, True),
    ],
)
def test_a_request_waits_only_for_a_rule_in_force(entropy: dict[str, Any], waits: bool) -> None:
    held = policy(entropy=ONLY | entropy).entropy
    assert hold_ms(held) == (held.eat_hold_ms if waits else 0)


# ----------------------------------------------------------------------------------------- shadow and the control group


def test_its_own_shadow_is_compared_like_a_section() -> None:
    made = stream(policy(scheduler=EARLY, entropy=ONLY | {"give_up_shadow": True}, loop={"enabled": False}))
    made.agent.eat_nats = 1.5
    made.open("a", think=40, answer=1)
    made.step(60)
    told = {(m.section, m.reason): m for m in made.session.shadow.messages()}
    assert set(told) == {("give_up", ""), ("give_up", "give_up")}
    one = told["give_up", "give_up"]
    assert (one.requests, one.would_end) == (1, 1)
    assert one.saved_tokens == 40 - one.would_end_think_tokens > 20


def stopped(entropy: dict[str, Any], name: str = CONTROL) -> Stream:
    """Run one request whose answer changes at every probe until its thinking ends by itself."""
    rules = {**ONLY, "holdout_share": 0.5, **entropy}
    made = stream(policy(scheduler=EARLY, entropy=rules))
    made.open(name, think=60, answer=3, eat_nats=lambda tokens: 1.5, trial_answer=lambda tokens: tokens)
    made.step(80)
    assert made.balanced()
    return made


@pytest.mark.parametrize(
    ("entropy", "stopped_requests", "saves", "judged"),
    [
        # Each answer that changes seems to be harm, but an answer that changes is what makes the rule fire.
        ({}, 1, True, (0, 0, 0, 0)),
        # What EAT would have ended is still judged.
        ({"eat_level_threshold_nats": 2.0, "eat_ema_variance_threshold": 1.0}, 1, True, (1, 1, 1, 0)),
        # The rule's own shadow is no end.
        ({"give_up_shadow": True}, 0, False, (1, 0, 0, 0)),
    ],
)
def test_a_request_of_the_control_group_that_would_be_given_up_is_not_harmed(
    entropy: dict[str, Any], stopped_requests: int, saves: bool, judged: tuple[int, ...]
) -> None:
    found = counts(stopped(entropy))
    assert (found.control.requests, found.control.stopped) == (1, stopped_requests)
    assert found.shadow_saved_tokens > 40 if saves else found.shadow_saved_tokens == 0
    assert (found.judged, found.judged_stops, found.harmful, found.unjudged) == judged


def test_a_treated_request_is_given_up() -> None:
    found = counts(stopped({}, TREATED))
    assert (found.treated.requests, found.treated.stopped) == (1, 1)
