"""The headers of a request name its tenant and its SLO class, and no key or token comes out of them."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meridian_agent.core.request_info import MAX_TEXT
from meridian_agent.core.request_sources import OF_SLO_CLASS, OF_TENANT, RequestSources, Sender, Source, source_of

SECRET, KEY = b"sixteen bytes or more", "sk-team-a-4711"


def token(payload: object, **more: Any) -> str:
    """Return an unsigned JSON web token. more: replaces its second part."""
    part = base64.urlsafe_b64encode(json.dumps(payload).encode()).rstrip(b"=").decode()
    return f"e30.{more.get('second', part)}.c2ln"


def read(said: str, *headers: tuple[str, str]) -> str:
    sources = RequestSources(source_of(said, OF_TENANT), None, SECRET)
    sender = sources.read([(name.encode(), value.encode()) for name, value in headers])
    assert not sender.slo_class
    return sender.tenant


def bearer(value: str) -> tuple[str, str]:
    return "authorization", f"Bearer {value}"


HASH = f"key-{hmac.new(SECRET, KEY.encode(), hashlib.sha256).hexdigest()[:16]}"


@pytest.mark.parametrize(
    ("said", "headers", "tenant"),
    [
        ("header:X-Tenant", [("x-tenant", "acme"), ("x-other", "b")], "acme"),
        ("header: x-tenant ", [("x-tenant", " \u00e9t\u00e9 ")], "\u00e9t\u00e9"),
        ("header:x-tenant", [], ""),
        ("header:x-tenant", [("x-tenant", "")], ""),
        # The gateway may have added its own header to the client's.
        ("header:x-tenant", [("x-tenant", "acme"), ("x-tenant", "rich")], ""),
        ("header:x-litellm-user_api_key_hash", [("x-litellm-user_api_key_hash", "88dc28")], "88dc28"),
        ("api_key", [bearer(KEY)], HASH),
        ("api_key", [("authorization", f"bearer  {KEY} ")], HASH),
        ("api_key:Authorization", [bearer(KEY)], HASH),
        ("api_key:x-api-key", [("x-api-key", KEY), bearer("other")], HASH),
        ("api_key", [("x-api-key", KEY)], ""),
        ("api_key", [("authorization", f"Basic {KEY}")], ""),
        ("api_key", [bearer(KEY), bearer("other")], ""),
        ("api_key", [bearer("")], ""),
        ("verified_claim:org", [bearer(token({"org": "acme"}))], "acme"),
        ("verified_claim:https://acme.example/org", [bearer(token({"https://acme.example/org": "a"}))], "a"),
        ("verified_claim:org", [bearer(token({"org": 12}))], "12"),
        *(("verified_claim:org", [bearer(token({"org": bad}))], "") for bad in (None, True, ["acme"], {"a": 1})),
        ("verified_claim:org", [bearer(token(["org"]))], ""),
        ("verified_claim:org", [bearer(token({"sub": "me"}))], ""),
        *(("verified_claim:org", [bearer(token(0, second=bad))], "") for bad in ("", "!", "e30", "bm8", "\u00e9")),
        ("verified_claim:org", [bearer(token(0, second=base64.b64encode(b"[" * 30_000).decode()))], ""),
        ("verified_claim:org", [bearer(KEY)], ""),
        ("user", [("x-tenant", "acme"), bearer(KEY)], ""),
    ],
)
def test_the_tenant_of_a_request(said: str, headers: list[tuple[str, str]], tenant: str) -> None:
    assert read(said, *headers) == tenant


@pytest.mark.parametrize("said", ["header:x-tenant", "verified_claim:org"])
def test_long_tenants_that_begin_alike_are_different(said: str) -> None:
    long = [f"{'x' * MAX_TEXT}{end}" for end in ("", "a", "b", "\n", "\\n")]
    found = [read(said, ("x-tenant", f"|{name}|"), bearer(token({"org": f"|{name}|"}))) for name in long]
    assert len(set(found)) == 4, "only the line end is written as its escape"
    assert {len(name) for name in found} == {MAX_TEXT}


def test_tenant_and_class_of_one_request() -> None:
    sources = RequestSources(source_of("header:x-tenant", OF_TENANT), source_of("verified_claim:tier", OF_SLO_CLASS))
    headers = [(b"x-tenant", b"acme"), (b"authorization", f"Bearer {token({'tier': 'gold'})}".encode())]
    assert sources.read(headers) == Sender("acme", "gold")
    assert str(sources) == "tenant from header:x-tenant, SLO class from verified_claim:tier"
    assert not str(RequestSources())


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("x-tenant", "not one of"),
        ("header", "name of an HTTP header"),
        ("header:x tenant", "name of an HTTP header"),
        ("api_key:x:y", "name of an HTTP header"),
        ("user:name", "no name"),
        ("verified_claim", "name of a claim"),
        (f"verified_claim:{'x' * 999}", "name of a claim"),
        *(
            (f"header:{name}", "a secret")
            for name in ("Authorization", "x-api-key", "X_API_KEY", "cookie", "x-id-token")
        ),
    ],
)
def test_a_source_that_cannot_be_used(said: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        source_of(said, OF_TENANT)


@pytest.mark.parametrize("said", ["user", "api_key", "api_key:x-api-key"])
def test_a_client_does_not_choose_its_class_by_what_it_sends(said: str) -> None:
    with pytest.raises(ValueError, match="not one of header, verified_claim"):
        source_of(said, OF_SLO_CLASS)


@given(
    st.sampled_from(["header:a", "api_key", "api_key:a", "verified_claim:a"]),
    st.lists(st.tuples(st.sampled_from([b"a", b"authorization"]), st.binary() | st.binary().map(b"Bearer ".__add__))),
)
def test_any_header_gives_a_printable_text(said: str, headers: list[tuple[bytes, bytes]]) -> None:
    tenant = RequestSources(source_of(said, OF_TENANT), Source("nothing"), SECRET).read(headers).tenant
    assert len(tenant) <= MAX_TEXT
    tenant.encode()
