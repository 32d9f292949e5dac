"""What a client sees of its request beside what the engine has, through vLLM's own server: ids, ends, and hostile
texts."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import grpc
import httpx
from meridian.v1 import agent_pb2, fleet_pb2, fleet_pb2_grpc
from typer.testing import CliRunner

from meridian_control.cli.main import app
from tests.data import maze
from tests.engine import SHORT
from tests.engine.ctl import ctl
from tests.engine.policies import NEUTRAL
from tests.engine.served import Served, paused, stream
from tests.processes import RPC_S, Control, wait_for

PROMPT = maze.prompts(1, seed=5)[0]
# Colours, the clipboard, lines that are erased, a forged line, another reading direction.
HOSTILE = "rid\x1b[31m\nCRITICAL forged\r\x1b]52;c;aGk=\x07\x1b[2K\x1b[1A\u202egnp\u2028\x9b31m\x7f"
RAW = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def post(served: Served, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> dict[str, Any]:
    url = f"http://127.0.0.1:{served.port}/v1/{path}"
    body = {"model": "maze", "temperature": 0.0, **body}
    answer = httpx.post(url, json=body, headers=headers, timeout=RPC_S * 6, verify=False)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def chat(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 40, **more}


def written(served: Served) -> str:
    """Return a word that the model writes soon."""
    text: str = post(served, "completions", {"prompt": PROMPT, "max_tokens": 40})["choices"][0]["text"]
    return text.split()[5]


def stopped(served: Served, stop: str, request_id: str) -> dict[str, Any]:
    """Return the answer to a request that ends at a stop string, with enough tokens left for the abort of a slow front
    end to arrive before the request ends by its length."""
    long = {"prompt": PROMPT, "max_tokens": 900, "ignore_eos": True}
    return post(served, "completions", {**long, "stop": [stop], "request_id": request_id})


def left(served: Served, control: Control) -> list[fleet_pb2.RequestLife]:
    """Return what the control plane knows of the two choices of a chat whose client has disconnected, in time: on a
    busy machine a choice may reach its last token before the server hears of it, and another chat is sent."""
    lives: list[fleet_pb2.RequestLife] = []
    for number in range(5):
        asyncio.run(_leave(served, f"left-{number}"))
        found = explained(control, f"left-{number}", ends=2)
        lives = [found.life, *found.siblings]
        if all(life.events[-1].detail != "length" for life in lives):
            break
    return lives


async def _leave(served: Served, request_id: str) -> None:
    """Send a chat with two choices, and disconnect after the first part of the answer."""
    async with served.client() as client:
        chunks = await client.chat.completions.create(
            **chat(n=2, temperature=1.0, max_tokens=900),
            model="maze",
            stream=True,
            extra_body={"ignore_eos": True, "request_id": request_id},
        )
        await anext(aiter(chunks))
        await chunks.close()


def explained(control: Control, request_id: str, ends: int = 1) -> fleet_pb2.ExplainRequestResponse:
    """Return what the control plane knows under an id, once so many requests of it have ended."""

    def over() -> fleet_pb2.ExplainRequestResponse | None:
        with control.channel() as channel:
            stub = fleet_pb2_grpc.FleetServiceStub(channel)
            asked = fleet_pb2.ExplainRequestRequest(request_id=request_id)
            try:
                found = stub.ExplainRequest(asked, timeout=RPC_S)
            except grpc.RpcError as error:
                # The engine may not have reported the request yet.
                if error.code() is grpc.StatusCode.NOT_FOUND:
                    return None
                raise
        lives = [found.life, *found.siblings]
        return found if len(lives) == ends and all(life.HasField("close_time") for life in lives) else None

    found: fleet_pb2.ExplainRequestResponse = wait_for(over, 60, f"{ends} requests to end as {request_id!a}")
    return found


def test_a_request_is_found_by_what_its_client_sees(apart: tuple[Served, Control]) -> None:
    served, control = apart
    own = {"X-Request-Id": "trace-7f"}
    answers = {
        "header": post(served, "chat/completions", chat(), own)["id"],
        "body": post(served, "chat/completions", chat(request_id="mine-1"))["id"],
        "random": post(served, "chat/completions", chat())["id"],
        "completion": post(served, "completions", {"prompt": PROMPT, "max_tokens": 8, "request_id": "c-1"})["id"],
        "response": post(served, "responses", {"input": PROMPT, "max_output_tokens": 40})["id"],
        "chosen": post(served, "responses", {"input": PROMPT, "max_output_tokens": 40, "request_id": "chosen"})["id"],
    }
    for seen in (*answers.values(), "trace-7f", "mine-1", "c-1", "chosen"):
        life = explained(control, seen).life
        assert seen in life.request_id
        assert life.request_id in ctl(control, "explain", seen)
    decisions = json.loads(ctl(control, "decisions", "--request", answers["completion"], "-o", "json"))
    assert all(answers["completion"] in made["request_id"] for made in decisions)


def test_all_choices_and_prompts_of_a_call_are_shown(apart: tuple[Served, Control]) -> None:
    served, control = apart
    several = post(served, "chat/completions", chat(n=3, temperature=1.0))["id"]
    found = explained(control, several, ends=3)
    engine_ids = {life.request_id for life in (found.life, *found.siblings)}
    assert {name.partition("_")[0] for name in engine_ids} == {"0", "1", "2"}
    shown = ctl(control, "explain", several)
    assert all(name in shown for name in engine_ids)
    prompts = post(served, "completions", {"prompt": [PROMPT, PROMPT], "n": 2, "max_tokens": 4, "temperature": 1.0})
    assert len({life.request_id for life in explained(control, prompts["id"], ends=4).siblings}) == 3
    (one,) = {life.request_id for life in (found.life, *found.siblings) if life.request_id.startswith("1_")}
    assert explained(control, one).life.request_id == one


def test_a_live_call_is_offered_by_its_choices(apart: tuple[Served, Control]) -> None:
    served, control = apart

    async def run() -> None:
        async with served.client() as client:
            chunks = await client.chat.completions.create(
                **chat(n=2, temperature=1.0, max_tokens=900),
                model="maze",
                stream=True,
                extra_body={"ignore_eos": True, "request_id": "two"},
            )
            await anext(aiter(chunks))
            # However slow the commands are, the call is live until they have ended.
            with paused(served):
                await asyncio.to_thread(wait_for, lambda: len(control.requests()) == 2, 60, "both choices")
                offered = await asyncio.to_thread(
                    CliRunner().invoke, app, ["--server", control.target, "end", "chatcmpl-two"]
                )
                assert "0_chatcmpl-two-" in offered.output
                assert "1_chatcmpl-two-" in offered.output
                shown = await asyncio.to_thread(ctl, control, "requests", "--request", "two", "-o", "json")
                assert len(json.loads(shown)) == 2
                shown = await asyncio.to_thread(ctl, control, "requests", "--request", "x", "-o", "json")
                assert json.loads(shown) == []
            await chunks.close()

    asyncio.run(run())


def test_a_stop_string_is_no_disconnect(apart: tuple[Served, Control]) -> None:
    served, control = apart
    stop = written(served)
    answer = stopped(served, stop, "stopped")
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["stop_reason"] == stop
    life = explained(control, "stopped").life
    assert life.events[-1].detail == "stop"


def test_stop_strings_of_streams_sleep_while_the_model_thinks(apart: tuple[Served, Control]) -> None:
    """The front end has no stream of its own: the engine core tells it, output by output."""
    served, control = apart
    prompt = SHORT[0]
    control.apply(NEUTRAL)
    reasoning, content, _ = asyncio.run(stream(served, prompt))
    word = next(word for word in content.split() if word.isalpha() and word in reasoning)
    cut, nothing, finish = asyncio.run(stream(served, prompt, stop=[word]))
    assert (cut, nothing, finish) == (reasoning[: reasoning.index(word)], "", "stop")
    control.apply({})
    for include in (False, True):
        said = asyncio.run(stream(served, prompt, stop=[word], include_stop_str_in_output=include))
        until = content.index(word) + (len(word) if include else 0)
        assert said == (reasoning, content[:until], "stop")
    own = asyncio.run(stream(served, prompt, stop=[word], vllm_xargs={"meridian_answer_only_stops": 0}))
    assert own == (cut, nothing, finish)


def test_a_client_that_leaves_is_told_as_one(apart: tuple[Served, Control]) -> None:
    assert {life.events[-1].detail for life in left(*apart)} == {"the client has gone"}


def test_hostile_texts_reach_no_terminal_and_no_log(apart: tuple[Served, Control]) -> None:
    served, control = apart
    extra = {"meridian_tenant": HOSTILE, "meridian_slo_class": HOSTILE, "meridian_effort": HOSTILE}
    extra |= {"meridian_max_think_tokens": HOSTILE}
    for _ in range(40):
        post(served, "completions", {"prompt": "1", "max_tokens": 2, "request_id": HOSTILE, "vllm_xargs": extra})
    shown = ""
    for args in (["explain", HOSTILE], ["decisions"], ["requests"], ["engines"], ["explain", HOSTILE, "-o", "json"]):
        shown += ctl(control, *args)
    assert "CRITICAL forged" in shown
    assert not RAW.search(shown)
    assert not re.search("^CRITICAL", shown, re.MULTILINE)
    escaped = explained(control, HOSTILE, ends=33).life.request_id
    assert escaped in ctl(control, "explain", escaped)
    log = re.sub("\x1b\\[[0-9;]*m", "", served.process.output())
    lines = [line for line in log.split("\n") if "must be a number of tokens" in line]
    assert 1 < len(lines) < 20, "the rate is limited"
    assert all("meridian: request" in line and not RAW.search(line) for line in lines)
    assert not re.search("^.{0,60}CRITICAL", log, re.MULTILINE)


def test_the_reasons_of_old_agents_stay_readable() -> None:
    """The field is new in the message, and an old agent's abort has it unset."""
    assert not agent_pb2.RequestClosed(reason=agent_pb2.FINISH_REASON_ABORT).client_gone
