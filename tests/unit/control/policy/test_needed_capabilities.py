"""Capabilities that a policy needs of an engine: the defaults need none, and a section in force needs those that it
uses."""

from __future__ import annotations

from typing import Any

import pytest
from meridian.v1 import agent_pb2

from meridian_control.policy.needed_capabilities import missing
from tests.fakes.agent import ALL, hello
from tests.fakes.tables import policy

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


def lacks(**paths: str) -> str:
    """Return what is said of each capability that the engine lacks, and of the fields that need it."""
    return "; ".join(f"the engine lacks {name}, needed for {path}" for name, path in paths.items())


def budget(scheduler: Any = None, **fields: Any) -> dict[str, Any]:
    return {"scheduler": scheduler or {}, "budget": [{"name": "a", "tokens_per_day": 1, **fields}]}


def pressure(entropy: Any = None, **fields: Any) -> dict[str, Any]:
    entry = {"name": "a", "ttft_p99_ms": 1, **IN_FORCE, **fields}
    return {"scheduler": OFF, "entropy": entropy or {}, "pressure": [entry]}


def pools(**fields: Any) -> dict[str, Any]:
    both = {"thinking_pool": {"pool": "think"}, "answering_pool": {"pool": "answer"}}
    return {"disagg": {"enabled": True, **IN_FORCE, **both, **fields}}


OFF = {"enabled": False}
ZONE_A = {"labels": {"zone": "a"}}
EAT = "entropy.eat_level_threshold_nats"
ENTROPY = lacks(eat_probe=EAT, force_end=f"{EAT}, entropy.rpdi_threshold", token_entropy="entropy.rpdi_threshold")
FOUND = {"traffic": "org/m#00ff#chat", "entropy": {**IN_FORCE, "rpdi_threshold": 0.0}}
FOUND_ASKS = lacks(**dict.fromkeys(("eat_probe", "force_end"), "override[0].entropy.eat_level_threshold_nats"))
RPDI_OFF = {**IN_FORCE, "rpdi_threshold": 0.0, "eat_level_threshold_nats": 0.0}
LACKS_ENTROPY = {"capabilities": lacking("token_entropy")}
RPDI_TOGETHER = lacks(token_entropy="override[1].entropy.rpdi_threshold")
NO_RULE = {**IN_FORCE, "eat_level_threshold_nats": 0.0, "rpdi_threshold": 0.0}
UNDER_PRESSURE = lacks(**dict.fromkeys(("eat_probe", "force_end", "token_entropy"), "pressure[0].entropy_in_force"))
QUEUEING = lacks(queueing_time="pressure[0].queueing_p99_ms")
MARKERS = "the end marker has several tokens"
THINKS, ANSWERS = (
    {"labels": {"pool": pool}, reason: MARKERS}
    for pool, reason in (("think", "no_hand_over"), ("answer", "no_answer_handed_over"))
)
LIMITS = {"max_num_active_seqs": 4, "long_prefill_token_threshold": 64}
FIXED = agent_pb2.EngineLimits(
    max_num_active_seqs=agent_pb2.EngineLimit(startup=8, lowest=1, highest=8, refusal="vLLM 0.30.0 lacks: x"),
    long_prefill_token_threshold=agent_pb2.EngineLimit(lowest=16, highest=1024),
)
REFUSED = "the engine cannot change engine.max_num_active_seqs: vLLM 0.30.0 lacks: x"
OLDER = "; ".join(f"the engine cannot change engine.{name}: its agent does not know this limit" for name in LIMITS)
IN_ZONE = {"override": [{"engine_labels": {"zone": "a"}, "engine": LIMITS}]}
MAY, QUEUE = {"may_preempt": True}, {"no_preempt": "its queue has another order"}
SAID: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {}, ""),
    ({"scheduler": {"strategy": "stock"}}, {}, ""),
    # A rule that is switched off asks for nothing, and neither does give-up, which is in shadow by default.
    ({"entropy": NO_RULE}, {}, ""),
    ({"entropy": {**NO_RULE, "give_up_tokens": 1}}, {}, ""),
    ({"entropy": {**NO_RULE, "rank_conditions": [{"max_ranks": [5]}]}}, {"capabilities": lacking("eat_probe")}, ""),
    # All that is lacking is named.
    (
        {"entropy": IN_FORCE, "scheduler": {"strategy": "deadline"}},
        {},
        f"{lacks(dispatch='scheduler.strategy')}; {ENTROPY}",
    ),
    # Overrides ask where they may hold.
    *(
        ({"override": [{**match, "entropy": IN_FORCE}]}, ZONE_A, ENTROPY.replace("entropy.", "override[0].entropy."))
        for match in ({}, {"model": "m"}, {"engine_labels": {"zone": "a"}}, {"tenant": "acme", "effort": "low"})
    ),
    *(
        ({"override": [{**match, "entropy": IN_FORCE}]}, ZONE_A, "")
        for match in ({"model": "other-*"}, {"engine_labels": {"zone": "b"}})
    ),
    # Overrides ask together where one request may match both.
    *(
        (
            {"override": [{**first, "entropy": RPDI_OFF}, {**second, "entropy": {"rpdi_threshold": 2.0}}]},
            LACKS_ENTROPY,
            said,
        )
        for first, second, said in (
            ({"tenant": "a"}, {"slo_class": "chat"}, RPDI_TOGETHER),
            ({"tenant": "a"}, {"tenant": "*"}, RPDI_TOGETHER),
            ({"tenant": "a"}, {"tenant": "a"}, RPDI_TOGETHER),
            ({"tenant": "a"}, {"tenant": "b"}, ""),
            ({"tenant": "free-*"}, {"tenant": "*-acme"}, RPDI_TOGETHER),
            ({"tenant": "free-*"}, {"tenant": "free-acme"}, RPDI_TOGETHER),
            ({"tenant": "free-*"}, {"tenant": "paid-*"}, ""),
            ({"tenant": "free-*"}, {"tenant": "paid-acme"}, ""),
            ({"traffic": "m##chat"}, {"slo_class": "ch*"}, RPDI_TOGETHER),
            ({"traffic": "m##chat"}, {"slo_class": "batch"}, ""),
            ({"slo_class": "batch"}, {"traffic": "m##"}, ""),
        )
    ),
    # An override in between that holds for other requests, or that switches the rules off again, changes nothing.
    *(
        (
            {
                "override": [
                    {"slo_class": "batch", "entropy": RPDI_OFF},
                    {**between, "entropy": {"shadow": True}},
                    {"tenant": "acme", "entropy": {"rpdi_threshold": 2.0}},
                ]
            },
            LACKS_ENTROPY,
            RPDI_TOGETHER.replace("[1]", "[2]"),
        )
        for between in ({"slo_class": "chat"}, {"effort": "low"})
    ),
    (
        {
            "override": [
                {"tenant": "a", "loop": {"shadow": False, "enabled": False}},
                {"effort": "low", "loop": {"enabled": True}},
            ]
        },
        {},
        lacks(force_end="override[1].loop.enabled"),
    ),
    # A rule that self-calibration has found asks the engines of its model, also for an adapter of the model.
    *(
        ({"override": [FOUND]}, {"model_fingerprint": "00ff", "model": model}, FOUND_ASKS)
        for model in ("org/m", "served-name")
    ),
    *(({"override": [FOUND]}, {"model_fingerprint": other, "model": "org/m"}, "") for other in ("ff00", "")),
    # An engine in a pool needs what the pool does.
    (pools(), THINKS, f"{lacks(hand_over='disagg.thinking_pool')}: {MARKERS}"),
    (pools(), ANSWERS, f"{lacks(answer_handed_over='disagg.answering_pool')}: {MARKERS}"),
    (pools(), {**THINKS, "capabilities": agent_pb2.Capabilities(hand_over=True)}, ""),
    (pools(), {**ANSWERS, "capabilities": agent_pb2.Capabilities(answer_handed_over=True)}, ""),
    (pools(), {"labels": {"pool": "other"}}, ""),
    *((pools(**off), engine, "") for off in ({"shadow": True}, OFF) for engine in (THINKS, ANSWERS)),
    *((budget(**IN_FORCE, **own), {}, lacks(force_end="budget[0].max_think_tokens")) for own in ({}, {"model": "m*"})),
    *((asked, {}, "") for asked in (budget(), budget(**IN_FORCE, model="other"))),
    *((budget(off, **IN_FORCE), {}, "") for off in (OFF, {"shadow": True})),
    (pressure(entropy_in_force=True), {}, UNDER_PRESSURE),
    *((pressure(entropy_in_force=True, **own), {}, "") for own in ({"shadow": True}, {"model": "other"})),
    *((asked, {}, "") for asked in (pressure(), pressure(OFF, entropy_in_force=True))),
    (pressure(queueing_p99_ms=1), {}, QUEUEING),
    (pressure(queueing_p99_ms=1), {"capabilities": agent_pb2.Capabilities(queueing_time=True)}, ""),
    *((pressure(queueing_p99_ms=1, **own), {}, "") for own in ({"shadow": True}, {"model": "other"})),
    # A limit that the engine cannot change is refused by name. An override sets the limits of engines with its labels.
    ({"engine": LIMITS}, {"engine_limits": FIXED}, REFUSED),
    ({"engine": {**LIMITS, "max_num_active_seqs": 0}}, {"engine_limits": FIXED}, ""),
    ({"engine": LIMITS, "scheduler": {"strategy": "deadline"}}, {}, f"{lacks(dispatch='scheduler.strategy')}; {OLDER}"),
    (IN_ZONE, {**ZONE_A, "engine_limits": FIXED}, REFUSED),
    (IN_ZONE, {"labels": {"zone": "b"}, "engine_limits": FIXED}, ""),
    # Requests that may preempt ask.
    *((asked, QUEUE, "") for asked in ({"preemption": MAY}, {"preemption": IN_FORCE})),
    ({"preemption": {**MAY, **IN_FORCE}}, QUEUE, f"{lacks(preempt='preemption.may_preempt')}: {QUEUE['no_preempt']}"),
    (
        {"preemption": IN_FORCE, "override": [{"tenant": "chat", "preemption": MAY}]},
        QUEUE,
        f"{lacks(preempt='override[0].preemption.may_preempt')}: {QUEUE['no_preempt']}",
    ),
]


@pytest.mark.parametrize(("sections", "engine", "said"), SAID)
def test_what_is_said_of_an_engine(sections: dict[str, Any], engine: dict[str, Any], said: str) -> None:
    """An engine that can do nothing, unless it says what it can."""
    assert missing(policy(**sections), hello(**{"capabilities": agent_pb2.Capabilities(), **engine})) == said
