"""Each kind of shortening leaves the control group alone, and its harm is measured there."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from meridian.v1 import agent_pb2, fleet_pb2

from meridian_control.capabilities.control_group.stream import ControlGroup
from meridian_control.capabilities.pressure.stream import EnginePressure
from meridian_control.engine.shortening import FLOOR, LOWER_CAP
from meridian_control.policy.model import Policy
from meridian_control.policy.schema import TelemetryPolicy
from tests.fakes.tables import policy
from tests.unit.control.capabilities.control_group.test_stream import CONTROL, TREATED, counts
from tests.unit.sessions import CALIBRATED, Stream, each_token_ends_a_sentence, opens, play, stream

THINK, CUT = 120, 20
SHADOW = {"shadow": True, "holdout_share": 0.5}
BUDGET = {"name": "acme", "tokens_per_day": 1, "max_think_tokens": CUT, "shadow": False}
PRESSURE = {"name": "busy", "ttft_p99_ms": 1.0, "max_think_tokens": CUT, "shadow": False}


def harm_of(made: Stream, kind: str) -> fleet_pb2.ShorteningHarm:
    (found,) = [harm for harm in counts(made).kinds if harm.kind == kind]
    return found


def late(tokens: int) -> int:
    """The trial answer stays from 90 thinking tokens on."""
    return int(tokens >= 90)


def shortened(kind: str, **entropy: Any) -> Policy:
    """Return a policy in which only this kind shortens thinking, to CUT tokens or soon after."""
    scheduler: dict[str, Any] = {"min_think_tokens": 0}
    sections: dict[str, Any] = {}
    if kind == "cap":
        scheduler["max_think_tokens"] = CUT
    elif kind == "soft_close":
        scheduler["soft_think_tokens"] = CUT
    elif kind == "loop":
        sections["loop"] = {"shadow": False, "min_tokens": 32, "min_rounds": 2}
    elif kind == "budget":
        sections["budget"] = [BUDGET]
    elif kind == "pressure":
        sections["pressure"] = [PRESSURE]
    return policy(scheduler=scheduler, entropy={**SHADOW, **entropy}, **sections)


def run(kind: str, right_from: int, **entropy: Any) -> Stream:
    """Let a request of each arm think, whose trial answer is another one until `right_from` thinking tokens."""
    made = stream(shortened(kind, **entropy))
    each_token_ends_a_sentence(made)
    made.agent.end_rank = 1
    made.agent.eat_nats = 3.0
    made.stages(acme=FLOOR)
    made.session.part(EnginePressure).set_levels({"busy": 6})
    for name in (CONTROL, TREATED):
        made.open(name, THINK, 3, trial_answer=lambda tokens: int(tokens >= right_from))
    made.step(THINK + 20)
    return made


@pytest.mark.parametrize("kind", ["cap", "soft_close", "budget", "pressure"])
@pytest.mark.parametrize("right_from", [1, 90])
def test_each_kind_is_measured_although_the_entropy_rules_are_in_shadow(kind: str, right_from: int) -> None:
    made = run(kind, right_from)
    told, harm = counts(made), harm_of(made, kind)
    assert (told.control.requests, told.control.think_tokens) == (1, THINK), "nothing shortens the control group"
    assert (told.treated.requests, told.treated.stopped) == (1, 1)
    assert told.treated.think_tokens < CUT + 12
    assert (harm.judged, harm.judged_stops, harm.harmful, harm.unjudged) == (1, 1, int(right_from > CUT), 0)
    assert (harm.forced_ends.ends, harm.natural_ends.ends) == (1, 1)
    assert harm.HasField("harm_ratio")
    assert harm.name == {"budget": "acme", "pressure": "busy"}.get(kind, "")
    assert [other.kind for other in told.kinds] == [kind], "nothing is counted as another kind's"
    assert (
        {"shortened": 1, "judged": 1, "judged_stops": 1} | ({"harmful": 1} if right_from > CUT else {})
    ) == made.session.part(ControlGroup).verdicts


@pytest.mark.parametrize(("empty_until", "extended", "harmful"), [(90, 150, 0), (170, 150, 1), (30, 100, 0)])
def test_a_cap_that_an_empty_answer_extends_is_judged_where_it_would_end_the_thinking(
    empty_until: int, extended: int, harmful: int
) -> None:
    limits = {"min_think_tokens": 0, "max_think_tokens": 100, "empty_answer_extension_tokens": 50}
    made = stream(policy(scheduler=limits, entropy=SHADOW))
    made.agent.eat_nats = 3.0
    made.open(CONTROL, 200, 3)
    made.open(TREATED, 200, 3)
    for tokens in range(210):
        made.agent.empty_answer = tokens < empty_until
        made.step()
    told = counts(made)
    assert (told.treated.think_tokens, told.control.think_tokens) == (extended, 200)
    assert (harm_of(made, "cap").judged_stops, harm_of(made, "cap").harmful) == (1, harmful)
    assert told.shadow_saved_tokens == 200 - extended


def test_the_first_probe_near_a_new_cap_decides_about_its_extension() -> None:
    limits = {"min_think_tokens": 0, "max_think_tokens": 200, "empty_answer_extension_tokens": 50}
    made = stream(policy(scheduler=limits, entropy=SHADOW, budget=[{**BUDGET, "max_think_tokens": 100}]))
    play(made, {"acme": LOWER_CAP}, opens(CONTROL, 400, 3), opens(TREATED, 400, 3), 60, {"acme": 0})
    made.agent.empty_answer = True
    made.step(350)
    told = counts(made)
    assert (told.treated.think_tokens, told.shadow_saved_tokens) == (250, 400 - 250)


def test_harm_needs_probes_that_no_rule_asks_for() -> None:
    """Calibration without a rule on probes leaves a request one probe of the policy's own."""
    made = run("budget", 90, eat_probe_interval_tokens=2**31 - 1, rpdi_threshold=0.0, eat_level_threshold_nats=0.0)
    assert harm_of(made, "budget").harmful == 1
    probes = Counter(probe.slot for response in made.responses for probe in response.directives.probes)
    assert sorted(probes.values())[0] == 1
    assert max(probes.values()) > 5


@pytest.mark.parametrize(
    ("entropy", "capabilities", "why"),
    [
        ({"holdout_share": 0.0}, True, "entropy.holdout_share is 0, so no request is left unshortened"),
        ({"enabled": False}, True, "entropy.enabled is false, so no request is probed"),
        ({}, False, ""),
    ],
)
def test_harm_that_is_not_measured_is_not_0(entropy: dict[str, Any], capabilities: bool, why: str) -> None:
    able = agent_pb2.Capabilities(token_entropy=True, force_end=True, dispatch=True, eat_probe=capabilities)
    made = stream(shortened("budget", **entropy), capabilities=able)
    made.stages(acme=FLOOR)
    for name in (CONTROL, TREATED):
        made.open(name, THINK, 3)
    made.step(THINK + 20)
    told = made.session.part(ControlGroup).experiment
    assert told is not None
    assert told.counts.not_measured == why
    if entropy.get("holdout_share", 1):
        assert not harm_of(made, "budget").HasField("harm_ratio")
        assert counts(made).control.think_tokens == THINK, "it is the control group although it cannot be judged"


def test_a_budget_counts_from_when_it_shortens() -> None:
    """It would end longer thinking at once, and counts no request before."""
    made = stream(shortened("budget"))
    for name in (CONTROL, TREATED):
        made.open(name, THINK, 3)
    made.step(THINK + 20)
    assert (counts(made).judged, harm_of(made, "budget").judged) == (1, 0)
    made = stream(shortened("budget"))
    made.agent.eat_nats = 3.0
    play(made, opens(CONTROL, THINK, 3, trial_answer=late), 60, {"acme": LOWER_CAP}, THINK)
    assert (harm_of(made, "budget").judged, harm_of(made, "budget").harmful) == (1, 1)
    assert 55 <= THINK - counts(made).shadow_saved_tokens <= 65


def test_the_first_kind_to_end_thinking_is_blamed() -> None:
    """The policy's own cap would come later than the budget's."""
    rules = shortened("budget")
    later = rules.scheduler.model_copy(update={"max_think_tokens": 100})
    made = stream(rules.model_copy(update={"scheduler": later}))
    made.agent.eat_nats = 3.0
    play(made, {"acme": LOWER_CAP}, opens(CONTROL, THINK, 3, trial_answer=late), THINK + 20)
    assert [(harm_of(made, kind).judged, harm_of(made, kind).harmful) for kind in ("budget", "cap")] == [(1, 1), (1, 0)]


def test_only_the_rules_that_pressure_puts_in_force_fire_again() -> None:
    """Soft close was in force for treated requests before, and the give-up rule stays in shadow."""
    gives_up = {"give_up_tokens": 1, "give_up_eat_nats": 0.001, "give_up_shadow": True}
    rules = policy(
        scheduler={"min_think_tokens": 0, "soft_think_tokens": 5},
        entropy={**CALIBRATED, **SHADOW, **gives_up},
        pressure=[{**PRESSURE, "soft_think_tokens": 500, "max_think_tokens": 500, "entropy_in_force": True}],
    )
    made = stream(rules)
    each_token_ends_a_sentence(made)
    play(made, opens(CONTROL), 20)
    made.agent.checker.told[0].shadowed.remove(agent_pb2.FORCE_REASON_EAT)
    made.session.part(EnginePressure).set_levels({"busy": 6})
    made.step(10)
    # A revision that changes no rule leaves the pressure where it is.
    play(made, rules.model_copy(update={"telemetry": TelemetryPolicy(report_interval_steps=2)}), 10)
    forces = [event.decision for event in made.life(CONTROL).events if event.decision.kind == "force"]
    assert Counter(force.reason for force in forces) == {"eat": 2, "soft_close": 1, "give_up": 1}
