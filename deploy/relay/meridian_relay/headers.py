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
# The header by which a web page of another origin may read an answer, as vLLM gives it by default.
READABLE = {"Access-Control-Allow-Origin": "*"}
# Headers that belong to the client's own request, and are wrong on one that the relay writes.
OWN = {"host", "expect"}
# Longest head line in bytes, of a request and of a response; tokens and cookies may be long.
MAX_LINE = 1 << 16
OF_THE_BODY = OWN | {"content-length", "content-type", "content-encoding", "accept-encoding", "x-request-id"}


def passed(headers: MultiMapping[str], without: set[str]) -> CIMultiDict[str]:
    """Return the headers that a proxy passes on, but for those in `without` (in lower case) and those that are not
    UTF-8: aiohttp would write them without some of their bytes."""
    named = {name.strip().lower() for value in headers.getall("Connection", []) for name in value.split(",")}
    left_out = HOP_BY_HOP | named | without
    return CIMultiDict(
        (name, value) for name, value in headers.items() if name.lower() not in left_out and _is_utf8(value)
    )


def no_utf8(headers: MultiMapping[str]) -> str:
    """Return the name of a header that is not UTF-8; empty if there is none."""
    return next((name for name, value in headers.items() if not _is_utf8(value)), "")


def _is_utf8(value: str) -> bool:
    # Surrogates stand for bytes that are not UTF-8.
    return value.isascii() or not any("\ud800" <= sign <= "\udfff" for sign in value)


def is_json(headers: MultiMapping[str]) -> bool:
    """Return whether a request's body counts as JSON for vLLM, which refuses every other type.

    A browser sends JSON to another origin only after it has asked the server, but other types at once.
    """
    return headers.get("Content-Type", "").partition(";")[0].lower() == "application/json"
