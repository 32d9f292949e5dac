"""Fixtures that several contract tests of the control plane share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.contract.control.app.test_server import Process
from tests.contract.secured import Secured, securing
from tests.fakes.migrated import migrated


@pytest.fixture(params=["sqlite", "postgresql"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the address of a database without rows, of each kind in turn."""
    if request.param == "sqlite":
        return migrated(tmp_path / "meridian.db")
    return str(request.getfixturevalue("postgres").database())


@pytest.fixture
async def secured(tmp_path: Path) -> AsyncIterator[Secured]:
    async with securing(tmp_path) as running:
        yield running


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Process]:
    """Yield a control plane that has not started."""
    process = Process(tmp_path)
    yield process
    process.kill()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """Yield one control plane for all tests of a module that leave it as it is."""
    process = Process(tmp_path_factory.mktemp("control"))
    asyncio.run(process.started())
    yield process
    process.kill()
