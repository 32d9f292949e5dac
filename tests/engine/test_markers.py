"""A real engine whose thinking markers are unknown.

The agent takes every policy, obeys the decisions that need no markers, reports what is missing, and does the rest as
soon as a policy names the markers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from meridian_agent.core.phases import Phase
from tests.engine import STRIPPED, Run, chat, confirmed, rebuild
from tests.engine.policies import NEUTRAL
from tests.engine.recording import records, rows
from tests.engine.test_decisions import ENDLESS, opened
from tests.processes import MERIDIANCTL, Control, run, wait_for

CAP, LATER_CAP = 12, 40
# The property of vLLM's parsers with the text that opens thinking.
TEXT = "reasoning_start_str"
NAMED = {"model": {"maze": {"reasoning_parser": "qwen3"}}}


@pytest.fixture
def broken_parser() -> Iterator[None]:
    """Let vLLM know a parser, "broken", that fails when it is asked for its markers, and forget it after the test."""
    from vllm.reasoning import ReasoningParserManager

    def fails(_: Any) -> str:
        raise RuntimeError("a parser's error")

    base = ReasoningParserManager.get_reasoning_parser("qwen3")
    ReasoningParserManager.register_module("broken", module=type("Broken", (base,), {TEXT: property(fails)}))
    yield
    del ReasoningParserManager.reasoning_parsers["broken"]


@pytest.fixture
def parser() -> str:
    """Return the name of a parser whose markers the engine's tokenizer cannot write."""
    return "openai_gptoss"


@pytest.fixture
def blind(parser: str, llm: Any, scheduler: Any, control: Control) -> Iterator[Any]:
    """Return the agent of an engine that was started with a parser of which it gets no markers."""
    (end,) = scheduler._agent.tracker.markers.end
    outputs = scheduler.vllm_config.structured_outputs_config
    own, outputs.reasoning_parser = outputs.reasoning_parser, parser
    rebuild(scheduler)
    wait_for(lambda: control.engine().unknown_markers, 30, "an engine without markers")
    yield scheduler._agent, end
    outputs.reasoning_parser = own
    control.set_policy(NEUTRAL)
    rebuild(scheduler)
    wait_for(lambda: not control.engine().unknown_markers, 30, "the engine's own markers")


def test_what_needs_no_markers_works_and_the_rest_from_when_they_are_named(
    llm: Any, scheduler: Any, blind: tuple[Any, int], control: Control
) -> None:
    agent, end = blind
    params = ENDLESS | {"logit_bias": {end: -30.0}}
    control.apply({"scheduler": {"max_think_tokens": CAP}})
    engine = control.engine()
    assert not engine.nack_error
    for said in ("--reasoning-parser openai_gptoss", "think_end_token_ids", '[model."maze"]'):
        assert said in engine.unknown_markers
    assert engine.unknown_markers in engines_of(control)

    with records(agent) as seen:
        (tokens,) = chat(llm, [opened()], sampling(params, max_tokens=3 * CAP))
    assert end not in tokens
    assert {phase for said in rows(seen).values() for phase, *_ in said} == {Phase.UNKNOWN}
    assert not {"cap", "probe"} & set(control.settled().decisions)
    assert not any(kind.startswith("force") for kind in control.engine().decisions)

    control.freeze()
    confirmed(control, True)
    control.thaw()
    confirmed(control, False)

    run = Run(llm)
    run.add("live", opened(), sampling(params, max_tokens=3 * LATER_CAP))
    run.until(lambda: len(run.tokens["live"]) >= CAP)
    revision = control.set_policy({**NAMED, "scheduler": {"max_think_tokens": LATER_CAP}})
    # Settings are put in force at a step, but the new Hello is sent while no step is made.
    wait_for(lambda: agent.link.mailbox.arrived, 30, "the policy that names them")
    run.until(lambda: agent.tracker.markers.known)
    wait_for(lambda: not control.engine().unknown_markers, 30, "a Hello with the markers")
    run.until()
    assert run.tokens["live"].index(end) == LATER_CAP, "a request that was live meanwhile"
    wait_for(lambda: control.engine().acked_revision == revision, 30, "the policy to be acknowledged")

    (tokens,) = chat(llm, [opened()], sampling(params, max_tokens=3 * LATER_CAP))
    assert tokens.index(end) == LATER_CAP
    assert control.settled().decisions["cap"]
    assert control.engine().capabilities.template_strips_think


def test_a_stop_token_sleeps_from_when_the_markers_are_named(
    llm: Any, blind: tuple[Any, int], control: Control
) -> None:
    agent, end = blind
    policy = {"scheduler": {"answer_only_stops": "all", "answer_reserve_tokens": 0}}
    control.apply(policy)
    params = {"temperature": 0.0, "max_tokens": 400}
    (free,) = chat(llm, [opened()], sampling(params))
    # The thinking token that comes latest leaves the agent time to read the request again.
    thinking, run = free[: free.index(end)], Run(llm)
    run.add("live", opened(), sampling(params, stop_token_ids=[max(thinking, key=thinking.index)]))
    run.until(lambda: run.tokens["live"])
    control.set_policy({**NAMED, **policy})
    wait_for(lambda: agent.link.mailbox.arrived, 30, "the policy that names them")
    run.until()
    assert end in run.tokens["live"]


@pytest.mark.usefixtures("broken_parser")
@pytest.mark.parametrize("parser", ["broken"])
def test_markers_that_a_policy_names_are_missing_no_more(blind: tuple[Any, int], control: Control) -> None:
    """The engine's own parser fails in a way that nobody foresaw."""
    assert [fact for fact in control.engine().missing_facts if "a parser's error" in fact]
    control.apply(NAMED)
    wait_for(lambda: not control.engine().unknown_markers, 30, "a Hello with the markers")
    assert list(control.engine().missing_facts) == []


def test_what_the_template_strips_is_found_anew_with_other_markers(llm: Any, agent: Any, control: Control) -> None:
    """The model's template strips what stands between its own markers, and keeps all between others."""
    start, end = llm.get_tokenizer().convert_tokens_to_ids(["system", "user"])
    run = Run(llm)
    run.add("turns", opened(), sampling(ENDLESS, max_tokens=400, extra_args=STRIPPED))
    run.until(lambda: len(run.tokens["turns"]) >= CAP)

    def refusal(policy: dict[str, Any]) -> str:
        revision = control.set_policy(policy)
        wait_for(lambda: agent.link.mailbox.arrived, 20, "the policy")
        run.until(lambda: agent.link.lease.revision == revision)
        (live,) = agent.tracker.by_id.values()
        return str(agent.facts.later_turns.refusal(live, []))

    assert not refusal(NEUTRAL)
    others = {"think_start_token_ids": [start], "think_end_token_ids": [end]}
    assert refusal({**NEUTRAL, "model": {"maze": others}}) == "the chat template keeps the thinking"
    assert not refusal(NEUTRAL)
    run.abort("turns")


def sampling(params: dict[str, Any], **more: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**{**params, **more})


def engines_of(control: Control) -> str:
    """Return the output of `meridianctl engines`, on one line."""
    return " ".join(run([*MERIDIANCTL, "--server", control.target, "engines"]).stdout.split())
