"""A gateway names the tenant and the SLO class of requests to vLLM's real API servers, whatever clients write into the
body; a frozen engine, which is stock vLLM, serves the same requests."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.engine import confirmed
from tests.engine.ctl import ctl
from tests.engine.served import CLASS, CLOSING, CLOSING_TOKENS, PROMPTS, TENANT, TOKENS, Client, Served, governed
from tests.engine.test_effort import PROMPT
from tests.processes import RPC_S, Control, wait_for

# The cap of all tenants but one, in thinking tokens, which the agent knows before it sees a request.
SMALL = 7
# The same with the text in which vLLM closes thinking on the server with two front ends.
CLOSED = SMALL + CLOSING_TOKENS
POLICY: dict[str, Any] = {
    "entropy": {"enabled": False},
    "scheduler": {"max_think_tokens": SMALL, "min_think_tokens": 0},
    "override": [{"tenant": "rich", "scheduler": {"max_think_tokens": 900}}],
    "gateway": {"client_slo_classes": ["batch*"]},
}
# What a client writes into the body to pass for a tenant without a cap, and for a better class.
CLAIMS = {"meridian_tenant": "rich", "meridian_slo_class": "gold", "meridian_asked_slo_class": "", "meridian_user": "x"}
GATEWAY = {TENANT: "small", CLASS: "standard"}
SECRET, KEY = "0123456789abcdef-secret", "sk-guessable"


@contextlib.contextmanager
def serving(folder: Path, more: dict[str, str], options: Sequence[str] = ()) -> Iterator[Client]:
    with governed(folder, options, more, POLICY) as both:
        yield Client(*both)


@pytest.fixture
def client(fronts: Client) -> Client:
    """Return a client of a server with two API server processes, whose gateway sends both facts as headers."""
    fronts.control.apply(POLICY)
    return fronts


def who(client: Client, name: str) -> tuple[str, str, str]:
    life = client.life(name)
    return life.tenant, life.slo_class, life.refused_slo_class


def thoughts(answer: dict[str, Any]) -> list[int]:
    return [len(choice["message"]["reasoning"].split()) for choice in answer["choices"]]


async def streamed(client: Client, body: dict[str, Any], name: str) -> str:
    """Send a streaming chat request; return its reasoning."""
    reasoning = ""
    async with client.open() as api:
        headers = {**GATEWAY, "X-Request-Id": name}
        extra = {name: body.pop(name) for name in ("vllm_xargs",)}
        chunks = await api.chat.completions.create(
            model="maze", temperature=0.0, stream=True, extra_body=extra, extra_headers=headers, **body
        )
        async for chunk in chunks:
            for choice in chunk.choices:
                reasoning += getattr(choice.delta, "reasoning", None) or ""
    return reasoning


def test_every_api_gets_the_gateways_tenant(client: Client) -> None:
    """Chats, completions, responses and messages, streaming or not, with several choices or prompts."""
    turns, xargs = [{"role": "user", "content": PROMPT}], {"vllm_xargs": CLAIMS}
    chat = {"messages": turns, "max_tokens": TOKENS, **xargs}
    for name in ("chat-1", "chat-2", "chat-3", "chat-4"):
        assert thoughts(client.post("/chat/completions", chat, name, GATEWAY)) == [CLOSED]
    both = client.post("/chat/completions", {**chat, "n": 2, "temperature": 1.0, "seed": 3}, "chat-n", GATEWAY)
    assert max(thoughts(both)) <= CLOSED
    assert len(asyncio.run(streamed(client, dict(chat), "chat-stream")).split()) == CLOSED
    prompts = {"prompt": [f"{PROMPTS[0]}<think>\n", PROMPTS[1]], "max_tokens": 9, **xargs}
    client.post("/completions", prompts, "completion", GATEWAY)
    response = client.post("/responses", {"input": PROMPT, "max_output_tokens": TOKENS, **xargs}, headers=GATEWAY)
    client.post("/messages", {"messages": turns, "max_tokens": TOKENS}, "message", GATEWAY)
    refused = "small", "standard", "gold"
    names = ["chat-1", "chat-2", "chat-3", "chat-4", "chat-stream", "completion-0", "completion-1"]
    for name in [*names, f"{response['id']}_0", "0_chatcmpl-chat-n", "1_chatcmpl-chat-n"]:
        assert who(client, name) == refused, name
    assert who(client, "message") == ("small", "standard", "")
    assert "Traceback" not in client.process.output()


@pytest.mark.parametrize(
    ("headers", "own", "expected"),
    [
        # The policy lets clients choose some classes; those of the gateway need no leave.
        (GATEWAY, "batch-night", ("small", "batch-night", "")),
        (GATEWAY, "standard", ("small", "standard", "")),
        ({**GATEWAY, CLASS: "gold"}, None, ("small", "gold", "")),
        # A request that goes past the gateway has nothing, and its client gains nothing by it.
        ({}, "gold", ("", "", "gold")),
        ({CLASS: "gold"}, None, ("", "gold", "")),
    ],
)
def test_a_client_cannot_raise_its_class(
    client: Client, headers: dict[str, str], own: str | None, expected: tuple[str, str, str]
) -> None:
    name = f"class-{len(headers)}-{headers.get(CLASS)}-{own}"
    xargs = {"meridian_tenant": "rich"} | ({} if own is None else {"meridian_slo_class": own})
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": TOKENS, "vllm_xargs": xargs}
    before = client.metric("meridian_refused_slo_classes_total")
    client.post("/chat/completions", body, name, headers)
    assert who(client, name) == expected
    wait_for(
        lambda: client.metric("meridian_refused_slo_classes_total") == before + bool(expected[2]), RPC_S, "the count"
    )
    life = ctl(client.control, "explain", name)
    assert ("asked in vain for SLO class gold" in life) == bool(expected[2])


def test_the_policy_changes_what_clients_may_choose_while_the_engine_runs(client: Client) -> None:
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 9, "vllm_xargs": CLAIMS}
    client.control.apply({**POLICY, "gateway": {"client_slo_classes": ["*"]}})
    try:
        client.post("/chat/completions", body, "any", GATEWAY)
        assert who(client, "any") == ("small", "gold", "")
    finally:
        client.control.apply(POLICY)
    client.post("/chat/completions", body, "none", GATEWAY)
    assert who(client, "none") == ("small", "standard", "gold")


def test_thinking_follows_the_gateways_tenant(client: Client) -> None:
    """A frozen engine lets both tenants think alike. Under a budget one thinks less, and the other thinks as before."""
    chat = {"messages": [{"role": "user", "content": PROMPTS[2]}], "max_tokens": 80}
    spent = {"name": "small", "tenant": "small", "tokens_per_day": 1, "shadow": False, "min_think_tokens": 1}
    scheduler = {"min_think_tokens": 1, "answer_reserve_tokens": 0}
    policy = {**POLICY, "scheduler": scheduler, "override": [], "budget": [spent]}

    def answers() -> dict[str, Any]:
        sent = {name: {**GATEWAY, TENANT: name} for name in ("small", "other")}
        posts = {name: client.post("/chat/completions", chat, headers=headers) for name, headers in sent.items()}
        return {name: posted["choices"][0]["message"] for name, posted in posts.items()}

    client.control.freeze()
    try:
        confirmed(client.control, True)
        before = answers()
    finally:
        client.control.thaw()
    confirmed(client.control, False)
    assert before["small"] == before["other"]
    whole = before["small"]["reasoning"].strip()

    def shortened() -> bool:
        now = answers()
        assert now["other"] == before["other"]
        less = now["small"]["reasoning"].strip().removesuffix(CLOSING).strip()
        assert whole.startswith(less)
        return len(less) < len(whole)

    client.control.apply(policy)
    try:
        wait_for(shortened, 60, "the budget to shorten the thinking of its tenant alone")
    finally:
        client.control.apply(POLICY)
    assert client.metric('meridian_tenant_think_tokens_total{model="maze",tenant="small"}') > 0
    assert "a gateway names tenant from header:x-tenant, SLO class from header:x-class" in ctl(
        client.control, "engines"
    )


# ------------------------------------------------------------------------------------------- keys, claims and users


def token(**claims: str) -> str:
    payload = base64.urlsafe_b64encode(json.dumps(claims).encode()).rstrip(b"=").decode()
    return f"eyJhbGciOiJub25lIn0.{payload}.c2lnbmF0dXJl"


def test_a_key_and_a_token_stay_secret(folder: Path) -> None:
    """The tenant is a keyed hash of the API key, the class a claim of a verified token. No log, report, life, metric or
    file of the control plane or of the agent has the key, the token or the secret."""
    own = folder / "secret"
    (folder / "key-secret").write_text(SECRET)
    more = {
        "MERIDIAN_TENANT_FROM": "api_key:x-api-key",
        "MERIDIAN_SLO_CLASS_FROM": "verified_claim:tier",
        "MERIDIAN_KEY_SECRET_FILE": str(folder / "key-secret"),
    }
    digest = hmac.new(SECRET.encode(), KEY.encode(), hashlib.sha256).hexdigest()
    tenant, jwt = f"key-{digest[:16]}", token(tier="gold", sub="alice")
    chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": TOKENS, "vllm_xargs": CLAIMS}
    with serving(own, more) as client:
        headers = {"X-API-Key": KEY, "Authorization": f"Bearer {jwt}"}
        for i in range(4):
            assert thoughts(client.post("/chat/completions", chat, f"key-{i}", headers)) == [SMALL]
            assert who(client, f"key-{i}") == (tenant, "gold", "")
        client.post("/chat/completions", chat, "bare", {"Authorization": "Bearer not.a.token"})
        assert who(client, "bare") == ("", "", "gold")
        metric = f'meridian_tenant_think_tokens_total{{model="maze",tenant="{tenant}"}}'
        wait_for(lambda: client.metric(metric) > 0, RPC_S, "the tenant's tokens")
        shown = [ctl(client.control, "explain", "key-0", "-o", "json"), ctl(client.control, "decisions", "-o", "json")]
        client.control.settled()
    texts = [text.encode() for text in shown] + [path.read_bytes() for path in own.rglob("*") if path.is_file()]
    assert any(tenant.encode() in text for text in texts)
    for secret in (KEY, SECRET, jwt, jwt.split(".")[1], "alice", digest):
        assert not [text for text in texts if secret.encode() in text], secret


def test_the_user_is_the_tenant(by_default: tuple[Served, Control]) -> None:
    """`user` in the body names the tenant; a class whose setting cannot be used is nobody's, and the log says so."""
    xargs, client = {"vllm_xargs": CLAIMS}, Client(*by_default)
    client.control.apply(POLICY)
    turns = [{"role": "user", "content": PROMPT}]
    answer = client.post("/chat/completions", {"messages": turns, "max_tokens": 60, "user": "small", **xargs}, "chat")
    assert thoughts(answer) == [SMALL]
    client.post("/completions", {"prompt": PROMPT, "max_tokens": 9, "user": "small", **xargs}, "text")
    sent = {"input": PROMPT, "max_output_tokens": 9, "user": "small", **xargs}
    response = client.post("/responses", sent)
    client.post("/chat/completions", {"messages": turns, "max_tokens": 9, **xargs}, "nobody")
    # vLLM gives the requests of a beam search parameters of its own.
    beams = {"messages": turns, "max_tokens": 9, "n": 2, "use_beam_search": True, "user": "beams", **xargs}
    client.post("/chat/completions", beams)
    metric = 'meridian_tenant_think_tokens_total{model="maze",tenant="beams"}'
    wait_for(lambda: client.metric(metric) > 0, RPC_S, "the thinking of the beams")
    for name in ("chat", "text-0", f"{response['id']}_0"):
        assert who(client, name) == ("small", "", "gold"), name
    assert who(client, "nobody") == ("", "", "gold")
    assert "MERIDIAN_SLO_CLASS_FROM='api_key': not one of header, verified_claim" in client.process.output()
    assert "SLO class from nothing" in ctl(client.control, "engines")
