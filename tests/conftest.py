"""Fixtures that several folders share, and how tests are divided among processes."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.postgres import Postgres
from tests.preloaded import Servers
from tests.processes import ENGINE_ENV, Process, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Groups of tests in the order in which they begin: those that take longest first, ones that keep a core busy beside
# ones that wait. All others follow as they are collected.
FIRST = (
    "engine",
    "tests/chaos/test_faults.py",
    "tests/contract/test_rollout.py",
    "tests/soak/test_soak.py",
    "tests/engine/test_replicated.py",
    "tests/contract/test_whole_fleet.py",
    "tests/engine/test_matrix.py[ngram",
    "tests/engine/test_data_parallel.py",
    "tests/engine/test_served.py",
    "tests/engine/test_examples.py",
    "tests/contract/test_server.py",
    "tests/engine/test_matrix.py[async",
    "tests/engine/test_matrix.py[marked-async",
    "tests/sim/test_sim.py",
)


# Files in tests/engine that do not use the engine that the others share.
OF_THEIR_OWN = (
    "connectors",
    "data_parallel",
    "examples",
    "masks",
    "matrix",
    "needs",
    "replicated",
    "served",
    "templates",
)


def group(nodeid: str) -> str:
    """Tests of one group run in one process, one after the other: those on the shared engine, those of one build of
    the engine matrix, and else those of one file, for which what a module shares is started once."""
    path, _, test = nodeid.partition("::")
    folder, _, file = path.rpartition("/")
    if file == "test_matrix.py":
        return f"{path}[{test.partition('[')[2].partition(':')[0]}"
    if folder == "tests/engine" and file.removeprefix("test_").removesuffix(".py") not in OF_THEIR_OWN:
        return "engine"
    return path


def pytest_configure(config: pytest.Config) -> None:
    """The first of all processes of the tests starts what forks programs for them."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        servers = Servers(ENGINE_ENV)
        config.add_cleanup(servers.stop)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Only several processes need an order; one keeps the usual one."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        place = {name: number for number, name in enumerate(FIRST)}
        items.sort(key=lambda item: place.get(group(item.nodeid), len(place)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The scheduler of xdist's `--dist loadscope`, with groups for scopes."""
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    class Groups(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return group(nodeid)

    return Groups(config, log) if config.getvalue("dist") == "loadscope" else None


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """One PostgreSQL server for the session, started when the first test asks for it."""
    server = Postgres()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def stock_tokens(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The file that stock vLLM's greedy tokens come to, made while a governed engine starts. Of several test processes
    the first that asks has it made."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "stock"
    process = None
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
        env = {**ENGINE_ENV, "MERIDIAN_CONTROL": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        command = [sys.executable, "-m", "tests.engine.stock", str(folder / "stock.json")]
        process = Process(command, folder / "stock.log", env)
    yield folder / "stock.json"
    if process is not None:
        process.stop()


@pytest.fixture(scope="session")
def stock(stock_tokens: Path) -> list[list[int]]:
    """Greedy token ids of stock vLLM for `tests.engine.cases()`."""
    try:
        wait_for(stock_tokens.exists, 100, "stock vLLM to say what it says")
    except TimeoutError:
        raise AssertionError(stock_tokens.with_suffix(".log").read_text()[-3000:]) from None
    tokens: list[list[int]] = json.loads(stock_tokens.read_text())
    return tokens
