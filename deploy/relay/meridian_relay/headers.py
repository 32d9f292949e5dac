"""Chooses the headers that the relay passes on between clients and engines. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from multidict import CIMultiDict

if TYPE_CHECKING:
    from multidict import MultiMapping

REQUEST_ID = "X-Request-Id"
HOP_BY_HOP = {
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
}
# Headers that belong to the client's own request, and are wrong on one that the relay writes.
OWN = {"host", "expect"}
# Longest head line in bytes, of a request and of a response; tokens and cookies may be long.
MAX_LINE = 1 << 16
OF_THE_BODY = OWN | {"content-length", "content-type", "content-encoding", "accept-encoding", "x-request-id"}


def passed(headers: MultiMapping[str], without: set[str]) -> CIMultiDict[str]:
    """Return the headers that a proxy passes on, but for those in `without` (in lower case)."""
    named = {name.strip().lower() for value in headers.getall("Connection", []) for name in value.split(",")}
    left_out = HOP_BY_HOP | named | without
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in left_out)


def no_utf8(headers: MultiMapping[str]) -> str:
    """Return the name of a header that aiohttp would pass on without some of its bytes; empty if there is none."""
    # Surrogates stand for bytes that are not UTF-8.
    return next((name for name, value in headers.items() if any("\ud800" <= sign <= "\udfff" for sign in value)), "")


def is_json(headers: MultiMapping[str]) -> bool:
    """Return whether a request's body counts as JSON for vLLM, which refuses every other type.

    A browser sends JSON to another origin only after it has asked the server, but other types at once.
    """
    return headers.get("Content-Type", "").partition(";")[0].lower() == "application/json"
