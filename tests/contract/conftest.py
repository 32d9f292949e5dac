"""Fixtures that several contract tests share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.contract.streams import Control, Scripted, controlling, serving
from tests.patient import ASKING, LONG_S


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a replica in this process wait long for the others, which a busy machine makes slow."""
    for module in ASKING:
        monkeypatch.setattr(module, "CALL_TIMEOUT_S", LONG_S)


@pytest.fixture
async def control(tmp_path: Path) -> AsyncIterator[Control]:
    async with controlling(tmp_path / "meridian.db") as running:
        yield running


@pytest.fixture
async def scripted() -> AsyncIterator[Scripted]:
    servicer = Scripted()
    async with serving(servicer) as servicer.target:
        yield servicer
