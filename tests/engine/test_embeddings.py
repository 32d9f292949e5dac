"""Prompts that come as embeddings: thinking that they open is as on stock vLLM and counted as not governed; thinking
that the model opens itself is capped."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.data import maze
from tests.engine.served import Client, Served
from tests.engine.test_client_ids import explained
from tests.processes import MODEL, RPC_S, Control

PROMPT, CAP, TOKENS = maze.prompts(1, seed=8)[0], 5, 40


@pytest.fixture(scope="module")
def embedded() -> Callable[..., tuple[list[int], str]]:
    """Return a function that renders the prompt, and returns its token ids and its embeddings as vLLM's API takes
    them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(MODEL), AutoModelForCausalLM.from_pretrained(MODEL)

    def render(**settings: Any) -> tuple[list[int], str]:
        turns = [{"role": "user", "content": PROMPT}]
        given = {"add_generation_prompt": True, "return_dict": False, **settings}
        ids = list(tokenizer.apply_chat_template(turns, **given))
        with torch.no_grad():
            rows = model.get_input_embeddings()(torch.tensor(ids)).float()
        file = io.BytesIO()
        torch.save(rows, file)
        return ids, base64.b64encode(file.getvalue()).decode()

    return render


def complete(server: Served, control: Control, **body: Any) -> list[int]:
    """Return the generated tokens of a completion, once the control plane knows its end."""
    sent = {"model": "maze", "temperature": 0.0, "max_tokens": TOKENS, "return_token_ids": True, **body}
    url = f"http://127.0.0.1:{server.port}/v1/completions"
    answer = httpx.post(url, json=sent, timeout=RPC_S * 5, verify=False)
    assert answer.status_code == 200, answer.text
    explained(control, answer.json()["id"])
    return list(answer.json()["choices"][0]["token_ids"])


def test_what_a_prompt_of_embeddings_opens_is_as_on_stock_vllm_and_said(
    apart: tuple[Served, Control], embedded: Callable[..., tuple[list[int], str]]
) -> None:
    server, control = apart

    def counted() -> tuple[float, float]:
        """Return the unread prompts of the engine, and those of the fleet."""
        return control.settled().unread_prompts, Client(*apart).metric("meridian_unread_prompts_total")

    ids, rows = embedded(open_think=True)
    control.apply({"entropy": {"enabled": False}})
    free = complete(server, control, prompt=ids)
    limits = {"max_think_tokens": CAP, "answer_reserve_tokens": 9, "answer_reserve_for": "all"}
    control.apply({"entropy": {"enabled": False}, "scheduler": limits})
    assert complete(server, control, prompt=ids) != free, "a prompt of tokens is capped"
    engine, fleet = counted()
    assert complete(server, control, prompt_embeds=rows) == free
    assert counted() == (engine + 1, fleet + 1)


def test_thinking_that_the_model_opens_after_embeddings_is_capped(
    apart: tuple[Served, Control], embedded: Callable[..., tuple[list[int], str]]
) -> None:
    server, control = apart
    ids, rows = embedded()
    control.apply({"entropy": {"enabled": False}, "scheduler": {"max_think_tokens": CAP}})
    capped = complete(server, control, prompt=ids)
    before = control.settled().ends.get("hard_cap", 0)
    assert complete(server, control, prompt_embeds=rows) == capped
    assert control.settled().ends["hard_cap"] == before + 1
