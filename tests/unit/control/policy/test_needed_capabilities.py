"""Capabilities that a policy needs of an engine: the defaults need none, and a section in force needs those that it
uses."""

from __future__ import annotations

from typing import Any

import pytest
from meridian.v1 import agent_pb2

from meridian_control.policy.needed_capabilities import missing
from tests.fakes.agent import ALL, hello
from tests.fakes.tables import policy

NONE = agent_pb2.Capabilities()
CAPABILITIES = ("token_entropy", "force_end", "eat_probe", "dispatch", "reclaim", "template_strips_think")


def lacking(*names: str) -> agent_pb2.Capabilities:
    return agent_pb2.Capabilities(**{name: name not in names for name in CAPABILITIES})


IN_FORCE = {"shadow": False}
ASKED: list[tuple[dict[str, Any], str, str]] = [
    ({"scheduler": {"strategy": "deadline"}}, "dispatch", "scheduler.strategy"),
    ({"scheduler": {"output_tpot_budget_ms": 5.0}}, "dispatch", "scheduler.output_tpot_budget_ms"),
    ({"scheduler": {"think_tpot_budget_ms": 5.0}}, "dispatch", "scheduler.think_tpot_budget_ms"),
    ({"scheduler": {"think_batch_multiplier": 5.0}}, "dispatch", "scheduler.think_batch_multiplier"),
    ({"scheduler": {"min_prefill_tokens": 5}}, "dispatch", "scheduler.min_prefill_tokens"),
    ({"scheduler": {"long_think_tokens": 5}}, "dispatch", "scheduler.long_think_tokens"),
    ({"scheduler": {"max_think_tokens": 600}}, "force_end", "scheduler.max_think_tokens"),
    ({"scheduler": {"answer_reserve_tokens": 1}}, "force_end", "scheduler.answer_reserve_tokens"),
    ({"scheduler": {"soft_think_tokens": 5}}, "token_entropy", "scheduler.soft_think_tokens"),
    ({"scheduler": {"empty_answer_extension_tokens": 5}}, "eat_probe", "scheduler.empty_answer_extension_tokens"),
    ({"kv_memory": {"think_phase_memory_fraction": 0.2}}, "dispatch", "kv_memory.think_phase_memory_fraction"),
    ({"entropy": IN_FORCE}, "eat_probe", "entropy.eat_level_threshold_nats"),
    ({"entropy": IN_FORCE}, "token_entropy", "entropy.rpdi_threshold"),
    ({"entropy": {**IN_FORCE, "rank_conditions": [{"max_ranks": [5]}]}}, "token_entropy", "entropy.rank_conditions"),
    ({"loop": IN_FORCE}, "force_end", "loop.enabled"),
    ({"override": [{"loop": IN_FORCE}]}, "force_end", "override[0].loop.enabled"),
    (
        {"entropy": {**IN_FORCE, "give_up_tokens": 9, "give_up_shadow": False, "eat_level_threshold_nats": 0.0}},
        "eat_probe",
        "entropy.give_up_tokens",
    ),
    ({"override": [{"scheduler": {"max_think_tokens": 5}}]}, "force_end", "override[0].scheduler.max_think_tokens"),
    ({"override": [{"entropy": IN_FORCE}]}, "eat_probe", "override[0].entropy.eat_level_threshold_nats"),
]


@pytest.mark.parametrize(("sections", "capability", "path"), ASKED)
def test_what_is_in_force_asks(sections: dict[str, Any], capability: str, path: str) -> None:
    asked = policy(**sections)
    assert missing(asked, hello(capabilities=ALL)) == ""
    said = missing(asked, hello(capabilities=lacking(capability)))
    assert said.startswith(f"the engine lacks {capability}, needed for ")
    assert path in said
    assert ";" not in said


@pytest.mark.parametrize(("sections", "capability", "path"), ASKED)
@pytest.mark.parametrize("how", ["shadow", "disabled"])
def test_what_is_shadowed_or_disabled_does_not(sections: dict[str, Any], capability: str, path: str, how: str) -> None:
    off = {"shadow": True} if how == "shadow" else {"enabled": False}
    section = path.split(".")[-2]
    quiet = {**sections, section: {**sections.get(section, {}), **off}}
    if "override" in sections and section in ("entropy", "loop"):
        quiet["override"] = [{section: {**sections["override"][0][section], **off}}]
    assert missing(policy(**quiet), hello(capabilities=lacking(capability))) == ""


def test_the_defaults_work_on_every_engine() -> None:
    assert missing(policy(), hello(capabilities=NONE)) == ""
    assert missing(policy(scheduler={"strategy": "stock"}), hello(capabilities=NONE)) == ""


def test_a_rule_that_is_switched_off_asks_for_nothing() -> None:
    off = {"shadow": False, "eat_level_threshold_nats": 0.0, "rpdi_threshold": 0.0}
    assert missing(policy(entropy=off), hello(capabilities=NONE)) == ""
    only_rank = {**off, "rank_conditions": [{"max_ranks": [5]}]}
    assert missing(policy(entropy=only_rank), hello(capabilities=lacking("eat_probe"))) == ""


def test_all_that_is_lacking_is_named() -> None:
    said = missing(policy(entropy=IN_FORCE, scheduler={"strategy": "deadline"}), hello(capabilities=NONE))
    assert said == (
        "the engine lacks dispatch, needed for scheduler.strategy; "
        "the engine lacks eat_probe, needed for entropy.eat_level_threshold_nats; "
        "the engine lacks force_end, needed for entropy.eat_level_threshold_nats, entropy.rpdi_threshold; "
        "the engine lacks token_entropy, needed for entropy.rpdi_threshold"
    )


@pytest.mark.parametrize(
    ("match", "asks"),
    [
        ({}, True),
        ({"model": "m"}, True),
        ({"model": "other-*"}, False),
        ({"engine_labels": {"zone": "a"}}, True),
        ({"engine_labels": {"zone": "b"}}, False),
        ({"tenant": "acme", "effort": "low"}, True),
    ],
)
def test_overrides_ask_where_they_may_hold(match: dict[str, Any], asks: bool) -> None:
    asked = policy(override=[{**match, "entropy": IN_FORCE}])
    said = missing(asked, hello(capabilities=NONE, labels={"zone": "a"}))
    assert bool(said) == asks


POOLS = {"enabled": True, "shadow": False, "thinking_pool": {"pool": "think"}, "answering_pool": {"pool": "answer"}}


@pytest.mark.parametrize(
    ("pool", "capability", "path", "reason"),
    [
        ("think", "hand_over", "disagg.thinking_pool", "no_hand_over"),
        ("answer", "answer_handed_over", "disagg.answering_pool", "no_answer_handed_over"),
    ],
)
def test_an_engine_in_a_pool_needs_what_the_pool_does(pool: str, capability: str, path: str, reason: str) -> None:
    own: dict[str, Any] = {"labels": {"pool": pool}, reason: "the end marker has several tokens"}
    lacks = hello(capabilities=NONE, **own)
    text = f"the engine lacks {capability}, needed for {path}: the end marker has several tokens"
    assert missing(policy(disagg=POOLS), lacks) == text
    assert missing(policy(disagg=POOLS), hello(capabilities=agent_pb2.Capabilities(**{capability: True}), **own)) == ""
    assert missing(policy(disagg=POOLS), hello(capabilities=NONE, labels={"pool": "other"})) == ""
    for off in ({"shadow": True}, {"enabled": False}):
        assert missing(policy(disagg=POOLS | off), lacks) == ""


@pytest.mark.parametrize(
    ("budget", "scheduler", "asks"),
    [
        ({"shadow": False}, {}, True),
        ({"shadow": False, "model": "m*"}, {}, True),
        ({"shadow": False, "model": "other"}, {}, False),
        ({}, {}, False),
        ({"shadow": False}, {"enabled": False}, False),
        ({"shadow": False}, {"shadow": True}, False),
    ],
)
def test_a_budget_in_force_asks_for_forced_ends(budget: dict[str, Any], scheduler: dict[str, Any], asks: bool) -> None:
    asked = policy(scheduler=scheduler, budget=[{"name": "a", "tokens_per_day": 1, **budget}])
    said = "the engine lacks force_end, needed for budget[0].max_think_tokens" if asks else ""
    assert missing(asked, hello(capabilities=NONE)) == said


@pytest.mark.parametrize(
    ("pressure", "entropy", "asks"),
    [
        ({}, {}, True),
        ({"entropy_in_force": False}, {}, False),
        ({"shadow": True}, {}, False),
        ({"model": "other"}, {}, False),
        ({}, {"enabled": False}, False),
    ],
)
def test_entropy_rules_under_pressure_ask_for_what_they_read(
    pressure: dict[str, Any], entropy: dict[str, Any], asks: bool
) -> None:
    entry = {"name": "a", "ttot_p99_ms": 1, "shadow": False, "entropy_in_force": True, **pressure}
    asked = policy(scheduler={"enabled": False}, entropy=entropy, pressure=[entry])
    lacking = "; ".join(
        f"the engine lacks {name}, needed for pressure[0].entropy_in_force"
        for name in ("eat_probe", "force_end", "token_entropy")
    )
    assert missing(asked, hello(capabilities=NONE)) == (lacking if asks else "")


@pytest.mark.parametrize(
    ("pressure", "asks"),
    [({}, True), ({"queueing_p99_ms": 0}, False), ({"shadow": True}, False), ({"model": "other"}, False)],
)
def test_a_target_for_queueing_time_asks_for_agents_that_report_it(pressure: dict[str, Any], asks: bool) -> None:
    entry = {"name": "a", "ttft_p99_ms": 1, "queueing_p99_ms": 1, "shadow": False, **pressure}
    asked = policy(scheduler={"enabled": False}, pressure=[entry])
    said = "the engine lacks queueing_time, needed for pressure[0].queueing_p99_ms" if asks else ""
    assert missing(asked, hello(capabilities=NONE)) == said
    assert missing(asked, hello(capabilities=agent_pb2.Capabilities(queueing_time=True))) == ""


LIMITS = {"max_num_active_seqs": 4, "long_prefill_token_threshold": 64}
FIXED = agent_pb2.EngineLimits(
    max_num_active_seqs=agent_pb2.EngineLimit(startup=8, lowest=1, highest=8, refusal="vLLM 0.30.0 lacks: x"),
    long_prefill_token_threshold=agent_pb2.EngineLimit(lowest=16, highest=1024),
)


def test_a_limit_that_the_engine_cannot_change_is_refused_by_name() -> None:
    said = missing(policy(engine=LIMITS), hello(capabilities=NONE, engine_limits=FIXED))
    assert said == "the engine cannot change engine.max_num_active_seqs: vLLM 0.30.0 lacks: x"
    assert missing(policy(engine={**LIMITS, "max_num_active_seqs": 0}), hello(engine_limits=FIXED)) == ""
    older = missing(policy(engine=LIMITS, scheduler={"strategy": "deadline"}), hello(capabilities=NONE))
    assert older == (
        "the engine lacks dispatch, needed for scheduler.strategy; "
        "the engine cannot change engine.max_num_active_seqs: its agent does not know this limit; "
        "the engine cannot change engine.long_prefill_token_threshold: its agent does not know this limit"
    )


def test_an_override_sets_limits_of_the_engines_with_its_labels_only() -> None:
    asked = policy(override=[{"engine_labels": {"zone": "a"}, "engine": LIMITS}])
    assert "max_num_active_seqs" in missing(asked, hello(engine_limits=FIXED, labels={"zone": "a"}))
    assert missing(asked, hello(engine_limits=FIXED, labels={"zone": "b"})) == ""


MAY = {"may_preempt": True}


@pytest.mark.parametrize(
    ("sections", "path"),
    [
        ({"preemption": {**MAY, **IN_FORCE}}, "preemption.may_preempt"),
        ({"preemption": IN_FORCE, "override": [{"tenant": "chat", "preemption": MAY}]}, "override[0].preemption"),
        ({"preemption": MAY}, ""),
        ({"preemption": IN_FORCE}, ""),
    ],
)
def test_requests_that_may_preempt_ask(sections: dict[str, Any], path: str) -> None:
    said = missing(policy(**sections), hello(capabilities=lacking(), no_preempt="its queue has another order"))
    assert path in said
    assert bool(path) == said.endswith("may_preempt: its queue has another order")
