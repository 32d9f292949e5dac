"""Decisions of the real control plane, applied by the real engine: exact to the token, one outcome each."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine import SHORT, Run, cases, chat, paced
from tests.engine.pacing import Settled, waits
from tests.engine.policies import CONVERGED, NEUTRAL
from tests.processes import MERIDIANCTL, Control, wait_for
from tests.processes import run as program

OPEN = {"open_think": True}
# Parameters of a request that goes on until a limit or a decision stops it, because end of sequence is ignored.
ENDLESS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 400, "ignore_eos": True}


def opened(index: int = 0) -> dict[str, Any]:
    return {**cases()[index], "template": OPEN}


def endless(agent: Any, **extra: Any) -> SamplingParams:
    """Return sampling that never ends thinking by itself, without touching what a forced token needs."""
    return SamplingParams(**{**ENDLESS, "logit_bias": {agent.tracker.markers.end[0]: -30.0}, **extra})


def outcomes_since(control: Control, before: Any) -> dict[str, int]:
    after = control.settled().outcomes
    return {k: after[k] - before.get(k, 0) for k in after if after[k] != before.get(k, 0)}


def test_cap_counts_from_the_models_own_start_marker(llm: Any, agent: Any, control: Control) -> None:
    control.apply({"scheduler": {"max_think_tokens": 9}})
    case = {**cases()[1], "template": {}}
    (tokens,) = chat(llm, [case], SamplingParams(temperature=0.0, max_tokens=60))
    start, end = agent.tracker.markers.starts[0][0], agent.tracker.markers.end[0]
    assert tokens.index(end) - tokens.index(start) - 1 <= 9
    assert tokens[tokens.index(start) + 10] == end


def test_own_cap_holds_in_shadow(llm: Any, agent: Any, control: Control) -> None:
    control.apply({"scheduler": {"shadow": True, "max_think_tokens": 3}})
    params = endless(agent, max_tokens=60, extra_args={"meridian_max_think_tokens": 12})
    (tokens,) = chat(llm, [opened()], params)
    assert tokens.index(agent.tracker.markers.end[0]) == 12


def test_every_decision_has_one_outcome(llm: Any, agent: Any, control: Control, settled: Settled) -> None:
    """With caps reached and not reached, probes, plans, tiers and an abort, there are as many outcomes as decisions."""
    control.apply({"scheduler": {"max_think_tokens": 60, "min_think_tokens": 0}, "entropy": {"shadow": True}})
    before = control.settled()
    run = Run(llm)
    for i in range(6):
        run.add(f"r{i}", cases()[i], SamplingParams(temperature=1.0, max_tokens=200, seed=i))
    run.until(lambda: len(run.tokens["r0"]) > 10, settled=settled)
    run.abort("r0")
    run.until()
    after = control.settled()
    assert sum(after.decisions.values()) > sum(before.decisions.values())
    assert sum(after.decisions.values()) == sum(after.outcomes.values())
    assert after.open_decisions == 0


@pytest.mark.parametrize("phase", ["think", "output"])
def test_abort(llm: Any, agent: Any, control: Control, settled: Settled, phase: str) -> None:
    before = dict(control.settled().outcomes)
    run = Run(llm)
    case = opened() if phase == "think" else {**cases()[2], "template": {"enable_thinking": False}}
    run.add("gone", case, endless(agent))
    run.until(lambda: len(run.tokens["gone"]) > 10, settled=settled)
    live = wait_for(control.requests, 20, "the request to be listed")
    assert live[0].phase == (2 if phase == "think" else 3)
    run.abort("gone")
    run.until()
    assert outcomes_since(control, before)["request_gone"] >= 1
    assert not agent.tracker.by_id
    assert not control.requests()


def test_policy_change_reaches_requests_in_flight(llm: Any, agent: Any, control: Control, settled: Settled) -> None:
    """A request that thinks without end under one policy is ended by the next one, while it runs."""
    run = Run(llm)
    run.add("r", opened(), endless(agent))
    run.until(lambda: len(run.tokens["r"]) >= 30)
    revision = control.set_policy({"scheduler": {"max_think_tokens": 20}})
    end = agent.tracker.markers.end[0]
    wait_for(lambda: agent.link.mailbox.arrived, 20, "the settings to arrive")
    run.step()
    (live,) = agent.tracker.by_id.values()
    # The cap comes with the answer to the ACK, which the step may have taken in already.

    def is_capped() -> bool:
        return live.cap is not None and live.cap.max_think_tokens == 20

    wait_for(lambda: is_capped() or waits(agent, "caps"), 20, "the cap to arrive")
    taken = len(run.tokens["r"])
    run.until(lambda: end in run.tokens["r"])
    assert 30 <= run.tokens["r"].index(end) <= taken + 1
    assert control.engine().acked_revision == revision
    run.until()
    control.settled()


def test_meridianctl_end_brings_the_answer(llm: Any, agent: Any, control: Control) -> None:
    """An operator ends a request that would think for long, by the client's part of its id, and an answer follows."""
    before = control.settled()
    end = agent.tracker.markers.end[0]
    run = Run(llm)
    run.add("slow", opened(), endless(agent, ignore_eos=False, max_tokens=900))
    run.until(lambda: len(run.tokens["slow"]) >= 30)
    wait_for(lambda: any(r.think_tokens >= 20 for r in control.requests()), 20, "the request to be listed")
    command = [*MERIDIANCTL, "--server", control.target, "end", "slow", "--reason", "a customer waits", "--wait", "5"]
    with ThreadPoolExecutor(1) as thread:
        operator = thread.submit(program, command)
        # The engine makes no step until the command has been started and its call has made the decision.
        decided = before.decisions.get("force/operator", 0)
        wait_for(lambda: control.engine().decisions["force/operator"] > decided, 60, "the operator's decision")
        run.until(lambda: end in run.tokens["slow"])
        told = operator.result(60)
    # A busy control plane may hear of the outcome later than the command waits; the request is still live.
    while told.returncode:
        assert "no outcome within 5 s" in told.stderr
        told = program(command)
    run.until()
    tokens = run.tokens["slow"]
    ended = tokens.index(end)
    assert ended >= 30
    answer = llm.get_tokenizer().decode(tokens[ended + 1 :], skip_special_tokens=True).strip()
    assert (told.returncode, told.stderr) == (0, ""), told.stderr
    assert answer
    assert run.finished["slow"] == "stop", "the model ended its answer itself"
    assert f"applied at {ended} thinking tokens" in told.stdout
    engine = control.settled()
    assert engine.ends["operator"] == before.ends.get("operator", 0) + 1
    life = control.explain("slow")
    (force,) = [e.decision for e in life.events if e.decision.kind == "force"]
    assert (force.reason, force.operator_reason, force.outcome_think_tokens) == ("operator", "a customer waits", ended)


def test_live_view(llm: Any, agent: Any, control: Control, settled: Settled) -> None:
    """FleetService shows a live request's phase, counts, signals, rank, tier and last decision with its reason."""
    run = Run(llm)
    tagged = {"meridian_tenant": "acme", "meridian_slo_class": "interactive"}
    run.add("seen", opened(), endless(agent, extra_args=tagged))
    run.until(lambda: len(run.tokens["seen"]) >= 24, settled=settled)
    live = wait_for(lambda: [r for r in control.requests() if r.think_tokens >= 24], 20, "24 thinking tokens")[0]
    assert (live.request_id.split("-")[0], live.phase, live.tenant, live.slo_class) == (
        "seen",
        2,
        "acme",
        "interactive",
    )
    assert live.entropy_nats >= 0
    assert live.end_rank >= 1
    assert live.end_logprob_nats < 0
    assert (live.rank, live.tier, live.max_think_tokens) == (544, 2, 100_000)
    assert live.last_decision.kind in {"cap", "tier", "probe"}
    assert live.last_decision.reason
    run.abort("seen")
    run.until()


def test_an_entropy_rule_ends_thinking_and_the_explained_life_shows_what_it_saw(
    llm: Any, agent: Any, control: Control, settled: Settled
) -> None:
    """EAT converges once the walk is complete: thinking ends there, and what is before it does not change. The
    explanation has opening, closing, EAT samples, the comparisons that were true, and the place of the forced end."""
    prompts = [{"prompt": p, "template": OPEN} for p in SHORT[:4]]
    params = SamplingParams(temperature=0.0, max_tokens=700)
    free = chat(llm, prompts, params)
    before = dict(control.settled().ends)
    revision = control.apply(CONVERGED)
    run = Run(llm)
    for i, case in enumerate(prompts):
        run.add(f"life-{i}", case, params)
    run.until(settled=settled)
    assert control.settled().ends["eat"] > before.get("eat", 0)
    end = agent.tracker.markers.end[0]
    for alone, tokens in zip(free, run.tokens.values(), strict=True):
        assert tokens[: tokens.index(end)] == alone[: tokens.index(end)]
        assert tokens.count(end) == 1
    assert any(t.index(end) < f.index(end) for f, t in zip(free, run.tokens.values(), strict=True))
    lives = {f"life-{i}": control.explain(f"life-{i}") for i in range(len(prompts))}
    ended = {name: life for name, life in lives.items() if any(e.detail == "eat" for e in life.events)}
    assert ended
    for name, life in lives.items():
        kinds = [e.kind for e in life.events if e.kind != "decision"]
        assert kinds[0] == "opened"
        assert kinds[-2:] == ["think_end", "closed"]
        assert life.think_tokens == run.tokens[name].index(end)
        assert life.HasField("close_time")
    for life in ended.values():
        (force,) = (e.decision for e in life.events if e.decision.kind == "force" and not e.decision.shadow)
        (end_event,) = (e for e in life.events if e.kind == "think_end")
        assert (force.reason, force.outcome, force.revision) == ("eat", 1, revision)
        assert force.outcome_think_tokens == end_event.think_tokens == life.think_tokens
        held = {c.signal: (c.value, c.operator, c.limit) for c in force.comparisons}
        assert held["eat_samples"][0] >= 5
        assert held["eat_ema_variance"][0] < held["eat_ema_variance"][2] == 0.05
        assert held["eat_ema_nats"][0] == pytest.approx(force.signals.eat_ema_nats)
        assert held["eat_ema_nats"][0] < held["eat_ema_nats"][2] == 0.2
        assert force.signals.end_rank >= 1
        probes = [e.decision for e in life.events if e.decision.kind == "probe" and e.decision.outcome == 1]
        assert len([p for p in probes if p.HasField("measured_eat_nats")]) >= force.signals.eat_samples
    text = str(lives)
    assert not any(str(case["prompt"]) in text for case in prompts)


def test_multi_token_end_marker(llm: Any, agent: Any, control: Control) -> None:
    """A forced end writes all tokens of the marker, and none of them counts as thinking."""
    vocabulary = llm.get_tokenizer().get_vocab()
    marker = [vocabulary["Wait"], agent.tracker.markers.end[0], vocabulary["."]]
    start = list(agent.tracker.markers.starts[0])
    model = {"maze": {"think_start_token_ids": start, "think_end_token_ids": marker}}
    control.apply({"scheduler": {"max_think_tokens": 10}, "model": model})
    (tokens,) = chat(llm, [opened()], endless(agent, max_tokens=40))
    assert tokens[10:13] == marker
    assert control.settled().open_decisions == 0


@pytest.mark.parametrize("rule", ["cap", "eat"])
def test_closing_text_before_the_marker(llm: Any, agent: Any, control: Control, settled: Settled, rule: str) -> None:
    """A forced end writes the model's closing text and then the marker."""
    text = "Wait . "
    closing = llm.get_tokenizer().encode(text, add_special_tokens=False)
    policy = {"scheduler": {"max_think_tokens": 20}} if rule == "cap" else CONVERGED
    control.apply({**policy, "model": {"maze": {"closing_text": text}}})
    (tokens,) = paced(llm, [opened()], SamplingParams(temperature=0.0, max_tokens=500), settled)
    at = tokens.index(agent.tracker.markers.end[0])
    assert len(closing) == 2
    assert tokens[at - len(closing) : at] == closing
    assert rule == "eat" or at == 20 + len(closing)


def test_a_natural_end_has_no_closing_text(llm: Any, agent: Any, control: Control) -> None:
    case, params = {"prompt": SHORT[0], "template": {}}, SamplingParams(temperature=0.0, max_tokens=400)
    free = chat(llm, [case], params)
    control.apply({**NEUTRAL, "model": {"maze": {"closing_text": "Wait . "}}})
    assert chat(llm, [case], params) == free
    assert agent.tracker.markers.end[0] in free[0]


def test_closing_text_that_holds_a_marker_is_refused(llm: Any, agent: Any, control: Control) -> None:
    control.set_policy({**NEUTRAL, "model": {"maze": {"closing_text": "Wait </think>"}}})
    engine = wait_for(lambda: e if (e := control.engine()).nack_error else None, 20, "a NACK")
    assert "closing text holds a thinking marker" in engine.nack_error
    control.apply(NEUTRAL)
