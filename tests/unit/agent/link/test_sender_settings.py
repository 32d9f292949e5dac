"""The environment says what names a request's tenant and SLO class; a mistake in it leaves every request without."""

from __future__ import annotations

from pathlib import Path

import pytest

from meridian_agent.core.request_sources import RequestSources, Source
from meridian_agent.link.sender_settings import SECRET_FILE, SLO_CLASS_FROM, TENANT_FROM, request_sources

NOTHING = Source("nothing")


@pytest.mark.parametrize(
    ("tenant", "slo_class", "secret", "expected", "complaint"),
    [
        (None, None, None, RequestSources(), ""),
        (" ", "", None, RequestSources(), ""),
        ("user", None, None, RequestSources(Source("user")), ""),
        (None, "header:X-Class", None, RequestSources(None, Source("header", "x-class")), ""),
        ("api_key", None, "s" * 16 + "\n", RequestSources(Source("api_key"), None, b"s" * 16), ""),
        ("api_key", "header:c", "s" * 15, RequestSources(NOTHING, Source("header", "c")), SECRET_FILE),
        ("api_key", None, None, RequestSources(NOTHING), SECRET_FILE),
        ("team", "verified_claim:tier", None, RequestSources(NOTHING, Source("verified_claim", "tier")), TENANT_FROM),
        (None, "user", None, RequestSources(None, NOTHING), SLO_CLASS_FROM),
    ],
)
def test_the_settings(  # noqa: PLR0917
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    tenant: str | None,
    slo_class: str | None,
    secret: str | None,
    expected: RequestSources,
    complaint: str,
) -> None:
    for name, value in ((TENANT_FROM, tenant), (SLO_CLASS_FROM, slo_class)):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    monkeypatch.delenv(SECRET_FILE, raising=False)
    if secret is not None:
        (tmp_path / "secret").write_text(secret)
        monkeypatch.setenv(SECRET_FILE, str(tmp_path / "secret"))
    assert request_sources() == expected
    assert complaint in caplog.text
    assert bool(caplog.text) == bool(complaint)
    assert (secret or "-") not in caplog.text or secret is None
