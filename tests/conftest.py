"""Fixtures that several folders share."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

from tests.postgres import Postgres
from tests.processes import ENGINE_ENV, Process

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """One PostgreSQL server for the session, started when the first test asks for it."""
    server = Postgres()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def stock_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """Stock vLLM's greedy tokens, made while a governed engine starts."""
    folder = tmp_path_factory.mktemp("stock")
    env = {**ENGINE_ENV, "MERIDIAN_CONTROL": ""}
    process = Process(
        [sys.executable, "-m", "tests.engine.stock", str(folder / "stock.json")], folder / "stock.log", env
    )
    yield process
    process.stop()


@pytest.fixture(scope="session")
def stock(stock_process: Process) -> list[list[int]]:
    """Greedy token ids of stock vLLM for `tests.engine.cases()`."""
    assert stock_process.popen.wait(600) == 0, stock_process.output()[-3000:]
    tokens: list[list[int]] = json.loads((stock_process.log.parent / "stock.json").read_text())
    return tokens
