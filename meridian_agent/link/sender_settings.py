"""Reads from the environment what names the tenant and the SLO class of requests.

If a setting cannot be used, no request has the fact, so that a mistake in it lets no client choose for itself.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from meridian_agent.core.request_sources import (
    API_KEY,
    LEAST_SECRET_BYTES,
    NOTHING,
    OF_SLO_CLASS,
    OF_TENANT,
    RequestSources,
    Source,
    source_of,
)
from meridian_agent.link.environment import complain, read

TENANT_FROM, SLO_CLASS_FROM = "MERIDIAN_TENANT_FROM", "MERIDIAN_SLO_CLASS_FROM"
SECRET_FILE = "MERIDIAN_KEY_SECRET_FILE"


def request_sources() -> RequestSources:
    """Return what names the tenant and the SLO class of this process's requests. What cannot be used is logged."""
    tenant, slo_class = _source(TENANT_FROM, OF_TENANT), _source(SLO_CLASS_FROM, OF_SLO_CLASS)
    if tenant is None or tenant.kind != API_KEY:
        return RequestSources(tenant, slo_class)
    secret = b""
    with contextlib.suppress(OSError, ValueError):
        secret = Path(read(SECRET_FILE)).read_bytes().strip()
    if len(secret) < LEAST_SECRET_BYTES:
        why = f"no file with at least {LEAST_SECRET_BYTES} bytes; no request has a tenant"
        complain(SECRET_FILE, read(SECRET_FILE), why)
        return RequestSources(Source(NOTHING), slo_class)
    return RequestSources(tenant, slo_class, secret)


def _source(name: str, kinds: tuple[str, ...]) -> Source | None:
    if not (said := read(name)):
        return None
    try:
        return source_of(said, kinds)
    except ValueError as error:
        complain(name, said, f"{error}; no request has this fact")
        return Source(NOTHING)
