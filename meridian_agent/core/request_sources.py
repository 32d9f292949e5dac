"""Reads the tenant and the SLO class of a request from the HTTP headers with which a gateway sends it. Pure.

No key and no token leaves this module. Of an API key it returns a keyed hash, because a guessed key could be verified
against a plain hash; of a token it returns the named claim.
"""

from __future__ import annotations

import base64
import hmac
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from meridian_agent.core.request_info import MAX_TEXT, distinct

if TYPE_CHECKING:
    from collections.abc import Iterable

HEADER, USER, API_KEY, CLAIM = "header", "user", "api_key", "verified_claim"
# Source of a fact whose setting cannot be used, so that no request has the fact.
NOTHING = "nothing"
# Kinds of sources: of a tenant, and of an SLO class, which a client must not choose by `user`.
OF_TENANT, OF_SLO_CLASS = (HEADER, USER, API_KEY, CLAIM), (HEADER, CLAIM)
AUTHORIZATION = "authorization"
# Fewest bytes of the secret with which API keys are hashed; hexadecimal digits of a hash that are kept, 64 bits.
LEAST_SECRET_BYTES, HASH_DIGITS = 16, 16
# Names of headers as HTTP defines them; last words of those that contain a secret and so name no tenant.
HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
SECRETS = frozenset({"authorization", "cookie", "cookie2", "key", "apikey", "token", "jwt", "secret", "password"})


class Source(NamedTuple):
    """The place of one fact. name: of a header in lower case, for HEADER and API_KEY, or of a claim."""

    kind: str
    name: str = ""

    def __str__(self) -> str:
        return ":".join(filter(None, self))


@dataclass(slots=True)
class Sender:
    """The tenant and the SLO class that a gateway names; empty if it names none."""

    tenant: str = ""
    slo_class: str = ""


class RequestSources(NamedTuple):
    """The places of both facts, None for a fact that nothing names. key_secret: the secret with which API keys are
    hashed."""

    tenant: Source | None = None
    slo_class: Source | None = None
    key_secret: bytes = b""

    def __str__(self) -> str:
        """Return the places in words, for people to read; empty if there are none."""
        named = (("tenant", self.tenant), ("SLO class", self.slo_class))
        return ", ".join(f"{name} from {source}" for name, source in named if source is not None)

    def read(self, headers: Iterable[tuple[bytes, bytes]]) -> Sender:
        """Return what the headers of a request name. headers: names in lower case and values, as ASGI has them."""
        given = list(headers)
        return Sender(*(self._read(source, given) for source in (self.tenant, self.slo_class)))

    def _read(self, source: Source | None, headers: list[tuple[bytes, bytes]]) -> str:
        if source is None:
            return ""
        if source.kind == HEADER:
            return distinct(_only(headers, source.name).strip())
        if source.kind == API_KEY:
            key = _bearer(headers) if source.name in {"", AUTHORIZATION} else _only(headers, source.name).strip()
            return hashed(key, self.key_secret) if key else ""
        return claim(_bearer(headers), source.name) if source.kind == CLAIM else ""


def source_of(said: str, kinds: tuple[str, ...]) -> Source:
    """Return the source that a setting names: `header:NAME`, `user`, `api_key`, `api_key:HEADER` or
    `verified_claim:NAME`. kinds: the kinds that the fact may have. Raises ValueError with the reason, which does not
    repeat the setting."""
    kind, _, name = (part.strip() for part in said.partition(":"))
    if kind not in kinds:
        raise ValueError(f"not one of {', '.join(kinds)}")
    if kind == USER and name:
        raise ValueError(f"{USER} has no name after it")
    if kind == CLAIM:
        if not name or len(name) > MAX_TEXT:
            raise ValueError(f"{CLAIM} needs the name of a claim, of at most {MAX_TEXT} characters, as in {CLAIM}:org")
        return Source(kind, name)
    if (name or kind == HEADER) and not HEADER_NAME.fullmatch(name):
        raise ValueError(f"{kind} needs the name of an HTTP header, as in {kind}:x-tenant")
    if kind == HEADER and re.split(r"[-_]", name.lower())[-1] in SECRETS:
        raise ValueError(f"a header that contains a secret; {API_KEY} takes a hash of it")
    return Source(kind, name.lower())


def hashed(key: str, secret: bytes) -> str:
    """Return the name of the tenant that an API key stands for: the first digits of the key's HMAC-SHA256."""
    return f"key-{hmac.digest(secret, key.encode(errors='surrogateescape'), 'sha256').hex()[:HASH_DIGITS]}"


def claim(token: str, name: str) -> str:
    """Return a claim of a JSON web token without verifying the token; empty if there is no such text or number."""
    parts = token.split(".")
    if len(parts) != 3:
        return ""
    try:
        payload = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    except (ValueError, RecursionError):
        return ""
    value = payload.get(name) if isinstance(payload, dict) else None
    return distinct(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else ""


def _only(headers: list[tuple[bytes, bytes]], name: str) -> str:
    """Return the value of a header; empty if the request has it twice, because the gateway may have added its own to
    the client's."""
    sought = name.encode()
    values = [value for known, value in headers if known == sought]
    return values[0].decode(errors="surrogateescape") if len(values) == 1 else ""


def _bearer(headers: list[tuple[bytes, bytes]]) -> str:
    scheme, _, given = _only(headers, AUTHORIZATION).partition(" ")
    return given.strip() if scheme.lower() == "bearer" else ""
