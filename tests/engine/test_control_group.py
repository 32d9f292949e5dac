"""The control group on the real engine: its thinking equals the free run's, its probes judge the rule, and what follows
its natural ends is counted beside what follows forced ends."""

from __future__ import annotations

from typing import Any

import pytest
from meridian.v1 import agent_pb2, fleet_pb2, fleet_pb2_grpc

from tests.data import maze
from tests.engine import Run, choose, prompt_ids
from tests.engine.pacing import Settled
from tests.engine.policies import CONVERGED
from tests.engine.test_rules import CASES, GREEDY, free_run
from tests.processes import RPC_S, Control, wait_for

SHARE = 0.5
# Tokens after which the stream breaks, when each request thinks.
BREAKS_AT = 10


def compared(control: Control) -> fleet_pb2.Savings:
    """Return the counts under the rules in force."""
    with control.channel() as channel:
        fleet = fleet_pb2_grpc.FleetServiceStub(channel)
        (savings,) = [s for s in fleet.GetSavings(fleet_pb2.GetSavingsRequest(), timeout=RPC_S).savings if s.in_force]
    return savings


def another_stream(agent: Any, control: Control) -> None:
    """End the agent's stream, and wait until the next one has the policy and the live requests."""
    before, live = control.engine().connect_time, len(control.requests())
    agent.link.restart()
    wait_for(lambda: control.engine().connect_time != before, 20, "another stream")
    wait_for(lambda: len(control.requests()) == live, 20, "the requests on it")
    wait_for(lambda: control.engine().acked_revision == agent.link.lease.revision, 20, "the policy to be acknowledged")


@pytest.mark.parametrize("breaks", [False, True])
def test_the_control_group_thinks_to_its_own_end(  # noqa: PLR0917
    llm: Any, agent: Any, control: Control, settled: Settled, breaks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All requests count, also if their stream breaks."""
    free, _ = free_run(llm, agent)
    arms = {f"arm-{breaks}-{number}": number % 2 == 0 for number in range(len(CASES))}
    choose(monkeypatch, SHARE, arms)
    # A request is held until its decision comes, so that a busy machine does not change the result. Each case counts
    # anew under rules of its own.
    own = {"holdout_share": SHARE, "eat_hold_ms": 5000 + breaks}
    control.apply({**CONVERGED, "entropy": {**CONVERGED["entropy"], **own}})
    run, end = Run(llm), agent.tracker.markers.end[0]
    for name, case in zip(arms, CASES, strict=True):
        run.add(name, case, GREEDY)
    if breaks:
        run.until(lambda: min(map(len, run.tokens.values())) == BREAKS_AT, settled=settled)
        another_stream(agent, control)
    run.until(settled=settled)
    control.settled()
    savings = compared(control)
    held = [any(event.kind == "control_group" for event in control.explain(name).events) for name in run.tokens]
    assert held == [*arms.values()]
    for is_control, alone, tokens in zip(held, free, run.tokens.values(), strict=True):
        at, natural = tokens.index(end), alone.index(end)
        assert tokens[:at] == alone[:at]
        assert at == natural if is_control else at <= natural
    assert (savings.control.requests, savings.treated.requests) == (sum(held), len(held) - sum(held))
    thought = {False: 0, True: 0}
    for is_control, tokens in zip(held, run.tokens.values(), strict=True):
        thought[is_control] += tokens.index(end)
    assert (savings.control.think_tokens, savings.treated.think_tokens) == (thought[True], thought[False])
    assert savings.control.stopped > 0
    # EAT fires on a probe, so each stop is judged by a probe, unless the stream has broken.
    assert (savings.judged, savings.unjudged) == (0 if breaks else sum(held), 0)
    assert savings.judged_stops == (0 if breaks else savings.control.stopped)


@pytest.mark.parametrize("again", [False, True])
def test_what_follows_forced_and_natural_ends(  # noqa: PLR0917
    llm: Any, agent: Any, control: Control, settled: Settled, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forced end writes the closing text exactly, and a request that thinks again afterwards is a re-entry.

    The maze model opens no second block of thinking, so in the second case a word that it writes in each answer, and
    never before, is declared as the start marker. The word before the prompt's last token opens the first thinking.
    The second thinking has no end.
    """
    text, tokenizer, end = "Wait . ", llm.get_tokenizer(), agent.tracker.markers.end[0]
    closing, (word,) = (tokenizer.encode(said, add_special_tokens=False) for said in (text, maze.ANSWER_WORDS[0]))
    start = {"think_start_token_ids": [word], "think_end_token_ids": [end]} if again else {}
    rules = {**CONVERGED["entropy"], "holdout_share": SHARE, "eat_hold_ms": 5000}
    model = {"maze": {"closing_text": text, **start}}
    # Both cases count anew, because the model's facts belong to the rules.
    control.apply({**CONVERGED, "entropy": rules, "model": model})
    arms = {f"ends-{again}-{number}": number % 2 == 0 for number in range(len(CASES))}
    choose(monkeypatch, SHARE, arms)
    run = Run(llm)
    for name, case in zip(arms, CASES, strict=True):
        *prompt, last = prompt_ids(llm, case)
        run.put(name, [*prompt, *[word] * again, last], GREEDY)
    run.until(settled=settled)
    control.settled()
    sides: dict[str, list[list[int]]] = {"forced": [], "natural": []}
    for name, tokens in run.tokens.items():
        events = control.explain(name).events
        forces = [e.decision for e in events if e.decision.kind == "force"]
        assert any(e.kind == "control_group" for e in events) == arms[name]
        assert any(force.outcome == agent_pb2.OUTCOME_APPLIED for force in forces) != arms[name]
        if not arms[name]:
            sides["forced"].append(tokens)
        elif any(force.reason == "eat" for force in forces):
            sides["natural"].append(tokens)
    told = compared(control)
    assert all(sides.values())
    for counts, kind in ((told.forced_ends, "forced"), (told.natural_ends, "natural")):
        answers = [tokens[tokens.index(end) + 1 :] for tokens in sides[kind]]
        assert (counts.ends, counts.reentries) == (len(answers), again * len(answers))
        assert all((word in answer) and (end not in answer) for answer in answers)
        written = [tokens[: tokens.index(end)][-len(closing) :] == closing for tokens in sides[kind]]
        assert all(written) if kind == "forced" else not any(written)
