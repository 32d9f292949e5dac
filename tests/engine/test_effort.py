"""Clients that know nothing of Meridian name an effort or a budget in vLLM's APIs, and policy receives both.

Each server is a real one; the first has two API server processes. The tests about tool calls use a model with random
weights, whose thinking and whose arguments are arbitrary text.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.data import maze
from tests.engine import SHORT
from tests.engine.served import CLOSING, CLOSING_TOKENS, TOKENS, Client, governed
from tests.processes import MARKED, wait_for

PROMPT = maze.prompts(1, seed=5)[0]
POLICY = {
    "entropy": {"enabled": False},
    "override": [{"effort": "ultra*", "scheduler": {"max_think_tokens": 900}}],
}


# ------------------------------------------------------------------------------------------------- efforts and budgets


@pytest.fixture
def client(fronts: Client) -> Client:
    """Return a client of a server with two API server processes, in which vLLM closes thinking with a text."""
    fronts.control.apply(POLICY)
    return fronts


def test_each_api_says_its_effort(client: Client) -> None:
    """Both API server processes copy the effort; meridian_effort takes precedence, and no effort stays no effort."""
    turns, before = [{"role": "user", "content": PROMPT}], client.metric("meridian_unknown_efforts_total")
    chats: dict[str, tuple[dict[str, Any], str]] = {
        **{f"chat-{i}": ({"reasoning_effort": "low"}, "low") for i in range(8)},
        "chat-none": ({"reasoning_effort": "none"}, "none"),
        "chat-silent": ({}, ""),
        "chat-own": ({"reasoning_effort": "low", "vllm_xargs": {"meridian_effort": "ultra-9"}}, "ultra-9"),
        "chat-beside": ({"reasoning_effort": "max", "vllm_xargs": {"meridian_slo_class": "a"}}, "max"),
    }
    messages = {
        "messages-effort": ({"output_config": {"effort": "high"}}, "high"),
        "messages-off": ({"thinking": {"type": "disabled"}}, "none"),
    }
    for name, (more, _) in chats.items():
        client.chat(name, **more)
    for name, (more, _) in messages.items():
        client.post("/messages", {"messages": turns, "max_tokens": TOKENS, **more}, name)
    minimal = {"input": PROMPT, "max_output_tokens": TOKENS, "reasoning": {"effort": "minimal"}}
    answered = client.post("/responses", minimal)
    expected = {name: effort for name, (_, effort) in {**chats, **messages}.items()}
    # vLLM numbers the turns of a response.
    expected[f"{answered['id']}_0"] = "minimal"
    assert {name: client.life(name).effort for name in expected} == expected
    # The gateway sends no class, and the policy lets clients choose none.
    assert client.life("chat-beside").refused_slo_class == "a"
    assert client.metric("meridian_unknown_efforts_total") == before
    assert "Traceback" not in client.process.output()


def test_unknown_efforts_are_counted(client: Client) -> None:
    """An effort that neither the APIs nor an override know gets the defaults; one series counts all such requests."""
    before = client.metric("meridian_unknown_efforts_total")
    for effort in ("turbo", "ultra-1", "LOW"):
        client.chat(f"unknown-{effort}", vllm_xargs={"meridian_effort": effort})
        assert client.life(f"unknown-{effort}").effort == effort
    wait_for(lambda: client.metric("meridian_unknown_efforts_total") == before + 2, 20, "both efforts to be counted")


def test_two_api_servers_tell_the_phases_together(client: Client) -> None:
    """vLLM gives the numbers of a step to one of the API servers, and any of them adds up what all were given: the
    thinking tokens that vLLM itself counts for the clients."""
    names = "think_tokens_total", "ttfvt_seconds_count"
    before = [client.phase_metric(name) for name in names]
    turns = [[{"role": "user", "content": prompt}] for prompt in SHORT[:4]]
    usages = [client.chat(messages=turn, max_tokens=400)["usage"] for turn in turns]
    think_tokens = sum(usage["completion_tokens_details"]["reasoning_tokens"] for usage in usages)
    after = [before[0] + think_tokens, before[1] + len(usages)]
    wait_for(lambda: [client.phase_metric(name) for name in names] == after, 20, f"{names} of {after}")
    requests = "requests/think", "requests/output"
    wait_for(lambda: not any(client.phase_metric(name) for name in requests), 20, "no request")


@pytest.mark.parametrize(("budget", "own", "cap"), [(7, None, 7), (9, 4, 4), (4, 9, 4), (0, None, 0), (-1, 5, 5)])
def test_of_two_caps_the_smaller_holds(client: Client, budget: int, own: int | None, cap: int) -> None:
    """vLLM's budget is the request's own cap; both act at the same token, and the end is reported as a cap's."""
    name = f"budget-{budget}-{own}"
    before = client.control.engine().ends["hard_cap"]
    xargs = {} if own is None else {"vllm_xargs": {"meridian_max_think_tokens": own}}
    message = client.chat(name, thinking_token_budget=budget, **xargs)["choices"][0]["message"]
    life = client.life(name)
    assert (life.max_think_tokens, life.think_tokens) == (cap, cap + CLOSING_TOKENS)
    thought = message["reasoning"].split()
    assert (len(thought), " ".join(thought[cap:])) == (cap + CLOSING_TOKENS, CLOSING)
    assert message["content"]
    assert [event.detail for event in life.events if event.kind == "think_end"] == ["hard_cap"]
    assert client.control.engine().ends["hard_cap"] == before + 1


def test_vllms_own_text_prevails_at_its_budget(client: Client) -> None:
    """The policy's closing text is written at the policy's cap; at vLLM's budget vLLM writes its own."""
    closing = {"model": {"maze": {"closing_text": "the walk ends"}}, "scheduler": {"max_think_tokens": 4}}
    client.control.apply({**POLICY, **closing})
    try:
        for name, budget, text, reason in (
            ("closing", 90, "the walk ends", "hard_cap"),
            ("prevails", 3, CLOSING, "natural"),
        ):
            message = client.chat(name, thinking_token_budget=budget)["choices"][0]["message"]
            thought = message["reasoning"].split()
            assert " ".join(thought[min(budget, 4) :]) == text
            assert "think" not in message["content"]
            assert message["content"]
            ends = [event.detail for event in client.life(name).events if event.kind == "think_end"]
            assert ends == [reason]
    finally:
        client.control.apply(POLICY)


def test_a_budget_holds_without_the_agent_too(client: Client) -> None:
    """A frozen engine is stock vLLM, and its answers are those of the governed engine."""
    budgets = (0, 6, 40)
    governed = [client.chat(thinking_token_budget=budget)["choices"][0]["message"] for budget in budgets]
    client.control.freeze()
    try:
        wait_for(lambda: client.control.engine().freeze.confirmed, 20, "the freeze")
        stock = [client.chat(thinking_token_budget=budget)["choices"][0]["message"] for budget in budgets]
    finally:
        client.control.thaw()
    wait_for(lambda: not client.control.engine().freeze.confirmed, 20, "the thaw")
    assert governed == stock


# ---------------------------------------------------------------------------------------------------------- tool calls

WAYS = ["left", "right", "on"]
TOOL = {
    "type": "function",
    "function": {
        "name": "turn",
        "description": "Turn.",
        # Without it vLLM's grammar allows any arguments.
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"way": {"type": "string", "enum": WAYS}},
            "required": ["way"],
            "additionalProperties": False,
        },
    },
}
# The model's prompt opens thinking, unless the request's effort is `none`.
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    "<think>\n{% if enable_thinking is defined and not enable_thinking %}</think>\n{% endif %}"
)
CAP, CALLS = 12, 2
TOOL_OPTIONS = ["--load-format", "dummy", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]


@pytest.fixture(scope="module")
def thinker(folder: Path) -> Path:
    """Return a model with random weights and a byte-level tokenizer that has `<think>` and `</think>`."""
    made = folder / "thinker"
    shutil.copytree(MARKED, made)
    tokenizer = made / "tokenizer.json"
    text = tokenizer.read_text().replace("<|start|>", "<think>").replace("<|end|>", "</think>")
    tokenizer.write_text(text)
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


def vocabulary(thinker: Path) -> dict[str, int]:
    """Return the id of each token; a byte-level tokenizer writes other characters for white space."""
    tokenizer = json.loads((thinker / "tokenizer.json").read_text())
    return {**tokenizer["model"]["vocab"], **{token["content"]: token["id"] for token in tokenizer["added_tokens"]}}


def ask(thinker: Path, seed: int, **more: Any) -> dict[str, Any]:
    """Return a request whose thinking ends only if it is ended, and whose call contains no needless white space."""
    blank = {"<think>", "</think>", "\u0120", "\u0109", "\u010a", "\u010d"}
    avoided = [token for text, token in vocabulary(thinker).items() if text in blank or set(text) <= blank]
    return {
        "logit_bias": {str(token): -100 for token in avoided},
        "messages": [{"role": "user", "content": f"Which way, {seed}?"}],
        "tools": [TOOL],
        "tool_choice": "required",
        "temperature": 1.0,
        "seed": seed,
        "max_tokens": 600,
        # The model does not end the request while it thinks.
        "min_tokens": CAP + 4,
        **more,
    }


def checked(calls: list[dict[str, str]], *texts: str | None) -> None:
    """Check that each tool call is whole, and that no other text and no marker came with the calls."""
    assert calls
    for call in calls:
        assert call["name"] == "turn"
        assert json.loads(call["arguments"]) in [{"way": way} for way in WAYS]
    assert not any(texts), texts


async def streamed(
    client: Client, body: dict[str, Any], extra: dict[str, Any]
) -> tuple[list[dict[str, str]], str, str]:
    """Send a streaming request; return its tool calls, its reasoning and its content."""
    calls: dict[int, dict[str, str]] = {}
    # The client's library does not know vLLM's own parameters.
    known = {name: value for name, value in body.items() if name != "min_tokens"}
    extra = {**extra, "min_tokens": body["min_tokens"]}
    reasoning = content = ""
    async with client.open() as api:
        chunks = await api.chat.completions.create(model="maze", stream=True, **known, extra_body=extra)
        async for chunk in chunks:
            for choice in chunk.choices:
                reasoning += getattr(choice.delta, "reasoning", None) or ""
                content += choice.delta.content or ""
                for part in choice.delta.tool_calls or ():
                    call = calls.setdefault(part.index, {"name": "", "arguments": ""})
                    call["name"] += part.function.name or ""
                    call["arguments"] += part.function.arguments or ""
    return [calls[i] for i in sorted(calls)], reasoning, content


@pytest.fixture(scope="module")
def parsed(folder: Path, thinker: Path) -> Iterator[Client]:
    """Yield a client of a server with a reasoning parser and a parser of tool calls."""
    options = ["--model", str(thinker), *TOOL_OPTIONS]
    with governed(folder / "parsed", options, policy={"entropy": {"enabled": False}}) as both:
        yield Client(*both)


@pytest.mark.parametrize(
    ("more", "thought"),
    [
        ({"vllm_xargs": {"meridian_max_think_tokens": CAP}}, CAP),
        # vLLM counts the line feed after the start marker as a thinking token.
        ({"thinking_token_budget": CAP}, CAP - 1),
        ({"thinking_token_budget": CAP, "vllm_xargs": {"meridian_max_think_tokens": CAP}}, CAP - 1),
        ({"thinking_token_budget": 0}, 0),
        ({"reasoning_effort": "none"}, 0),
    ],
    ids=["own cap", "budget", "both", "no budget", "no thinking"],
)
async def test_a_required_tool_call_under_a_cap(
    parsed: Client, thinker: Path, more: dict[str, Any], thought: int
) -> None:
    """Nothing of the thinking, and no marker, is in the tool calls or beside them; each end is the cap's."""
    client, name = parsed, f"tools-{thought}-{'-'.join(more)}"
    before = client.control.engine().ends["hard_cap"]
    for seed in range(CALLS):
        answer = client.post("/chat/completions", ask(thinker, seed, **more), f"{name}-{seed}")["choices"][0]
        message = answer["message"]
        checked([call["function"] for call in message["tool_calls"]], message["content"])
        life = client.life(f"{name}-{seed}")
        assert life.think_tokens == thought
    bodies = [ask(thinker, seed) for seed in range(CALLS)]
    for calls, _, content in await asyncio.gather(*(streamed(client, body, more) for body in bodies)):
        checked(calls, content)
    if "reasoning_effort" not in more:
        ends = before + 2 * CALLS
        wait_for(lambda: client.control.engine().ends["hard_cap"] == ends, 20, "every end to be reported as a cap's")


async def test_a_required_tool_call_without_a_reasoning_parser(folder: Path, thinker: Path) -> None:
    """vLLM's grammar then applies from the first token on, so there is no thinking, and no cap may break the grammar.

    The policy names the markers, so the agent believes that the requests think, and their caps are due.
    """
    ids = vocabulary(thinker)
    markers = {"think_start_token_ids": [ids["<think>"]], "think_end_token_ids": [ids["</think>"]]}
    policy = {"entropy": {"enabled": False}, "model": {"maze": markers}}
    options = ["--model", str(thinker), *TOOL_OPTIONS, "--reasoning-parser", ""]
    own = {"vllm_xargs": {"meridian_max_think_tokens": 3}}
    with governed(folder / "unparsed", options, policy=policy) as both:
        client = Client(*both)
        for seed in range(CALLS):
            message = client.post("/chat/completions", ask(thinker, seed, **own))["choices"][0]["message"]
            checked([call["function"] for call in message["tool_calls"]], message["content"], message["reasoning"])
        for calls, *texts in await asyncio.gather(
            *(streamed(client, ask(thinker, seed), own) for seed in range(CALLS))
        ):
            checked(calls, *texts)
        engine = client.control.settled()
        assert not engine.fault
        assert engine.ends["hard_cap"] == 0
