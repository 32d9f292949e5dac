"""vLLM's OpenAI server with the agent: the control plane is absent, killed and back, while clients stream.

Engine and control plane authenticate by certificates (mTLS); the engine's certificate lets it connect under its own id.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.certificates import Authority
from tests.data import maze
from tests.engine import ENGINE_ARGS
from tests.engine.served import PROMPTS, Served, all_of, phase_metrics, stream
from tests.processes import Control, free_port, wait_for

# Number of rounds, enough for most tokens to be still to come when the first rows arrive.
ROUNDS = 3


async def watched(served: Served, *names: str) -> None:
    """Send one request that thinks without end, and leave it once each of these metrics of the agent is not 0. It has
    hundreds of tokens to come then."""
    end = AutoTokenizer.from_pretrained(ENGINE_ARGS["model"]).convert_tokens_to_ids("</think>")
    more = {"logit_bias": {str(end): -100}, "ignore_eos": True, "max_tokens": 900}
    thinking = asyncio.create_task(stream(served, PROMPTS[0], **more))
    wanted = {f"meridian_vllm_{name}" for name in names}
    while not all(map((await asyncio.to_thread(phase_metrics, served.port)).get, wanted)):
        assert not thinking.done(), "the request has ended before its metrics came"
    thinking.cancel()
    await asyncio.wait([thinking])


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def served(folder: Path, authority: Authority) -> Iterator[tuple[Served, Path, int]]:
    """Yield a server whose control plane does not exist yet."""
    port = free_port()
    served = Served(folder, f"127.0.0.1:{port}", authority.issue("served"))
    wait_for(served.ready, 180, "vLLM to serve")
    yield served, folder / "served", port
    served.process.stop()


def secured(authority: Authority) -> dict[str, Any]:
    """Return a control plane's options and an operator's credentials."""
    server, access = authority.issue("server"), authority.folder / "access.toml"
    roles = {"served": "agent", "operator": "operator"}
    access.write_text("".join(f'[[identity]]\ncn = "{name}"\nrole = "{role}"\n' for name, role in roles.items()))
    files = {"--tls-cert": server.cert, "--tls-key": server.key, "--client-ca": server.ca, "--access": access}
    options = [str(part) for pair in files.items() for part in pair]
    return {"options": options, "credentials": authority.issue("operator").credentials().channel()}


def think_tokens_after(served: Served, answers: int) -> float:
    """Return the thinking tokens in vLLM's own metrics once these have so many answers and no live request."""

    def counted() -> float:
        metrics = phase_metrics(served.port)
        live = sum(value for name, value in metrics.items() if name.startswith("meridian_vllm_requests"))
        ended = not live and metrics["meridian_vllm_ttfvt_seconds_count"] == answers
        return ended and metrics["meridian_vllm_think_tokens_total"]

    return float(wait_for(counted, 20, f"{answers} answers in vLLM's own metrics"))


async def test_life_without_with_and_after_the_control_plane(
    served: tuple[Served, Path, int], authority: Authority
) -> None:
    """The control plane is absent at start, brought up, killed while clients stream, and brought back.

    No request fails, and the agent resyncs. vLLM's own metrics tell the phases all the time.
    """
    server, folder, port = served
    folder.mkdir()
    await watched(server, "requests/think", "kv_tokens/think")
    left = await asyncio.to_thread(think_tokens_after, server, 0)
    alone = await all_of(server)
    once = await asyncio.to_thread(think_tokens_after, server, len(alone)) - left
    # The tokens between two words, such as the end of a paragraph, are no words.
    assert once > sum(len(reasoning.split()) for reasoning, *_ in alone)
    assert all(finish == "stop" for _, _, finish in alone)
    assert sum(maze.is_correct(p, content) for p, (_, content, _) in zip(PROMPTS, alone, strict=True)) >= 4

    control = Control(folder, port, **secured(authority))
    try:
        assert control.engine().engine_id == "served"
        assert await all_of(server) == alone
        wait_for(lambda: control.engine().token_events > 0, 20, "token rows")

        streaming, tries = asyncio.gather(*(all_of(server) for _ in range(ROUNDS))), 1
        # On a busy machine all answers may have ended before a request is seen.
        while not await asyncio.to_thread(control.requests) or streaming.done():
            if streaming.done():
                assert streaming.result() == [alone] * ROUNDS
                streaming, tries = asyncio.gather(*(all_of(server) for _ in range(ROUNDS))), tries + 1
            await asyncio.sleep(0.01)
        control.process.kill()
        assert not streaming.done()
        assert await streaming == [alone] * ROUNDS
        sent = 2 + tries * ROUNDS
        assert await asyncio.to_thread(think_tokens_after, server, sent * len(alone)) == left + sent * once

        control.start()
        await asyncio.to_thread(wait_for, lambda: control.engine().acked_revision, 20, "the policy to be acknowledged")
        control.apply({"scheduler": {"max_think_tokens": 12}})
        capped = await all_of(server)
        assert all(len(reasoning.split()) <= 12 for reasoning, _, _ in capped)
        wait_for(lambda: control.engine().ends["hard_cap"] == len(PROMPTS), 20, "every cap to be reported")
    finally:
        control.process.stop()


async def test_own_cap_without_a_control_plane(served: tuple[Served, Path, int]) -> None:
    """`vllm_xargs` caps a request even if no control plane governs the engine."""
    server, _, _ = served
    reasoning, content, finish = await stream(server, PROMPTS[0], vllm_xargs={"meridian_max_think_tokens": 7})
    assert len(reasoning.split()) <= 7
    assert content
    assert finish == "stop"
