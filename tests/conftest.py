"""Fixtures that several folders share, and the division of tests among processes."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import fcntl
import functools
import gc
import json
import logging
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import typer.testing
from hypothesis import HealthCheck, settings

from meridian_agent.core.plain_log import PlainLog
from tests.engine import FIRST_TOKENS
from tests.postgres import Postgres
from tests.preloaded import FOLDER, TEST_PROCESS, Servers
from tests.processes import ENGINE_ENV, Process, wait_for

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

# A busy machine would exceed Hypothesis's own time limits. Each run tries other examples, so a few in each suffice.
EXAMPLES = int(os.environ.get("HYPOTHESIS_EXAMPLES", "25"))
settings.register_profile(
    "meridian", max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("meridian")

# Otherwise each run of the command line builds the tree of all commands anew.
typer.testing._get_command = functools.cache(typer.testing._get_command)  # type: ignore[attr-defined]

# Groups of tests in the order in which they begin: the longest first, with groups that keep a core busy beside groups
# that wait. All other groups follow in the order of collection.
FIRST = (
    "engine",
    "tests/engine/test_handover.py",
    "tests/chaos/test_faults.py",
    "tests/engine/test_matrix.py[v2-async",
    "tests/contract/control/cli/test_fleet_commands.py",
    "servers",
    "engine under faults",
    "tests/contract/control/rollout/test_rollout_guardrails.py",
    "tests/contract/control/rollout/test_rollout.py",
    "tests/soak/test_soak.py",
    "tests/engine/test_replicated.py",
    "tests/contract/control/fleet/test_whole_fleet.py",
    "tests/engine/test_matrix.py[ngram",
    "tests/engine/test_data_parallel.py",
    "tests/engine/test_served.py",
    "tests/contract/control/app/test_server.py",
    "tests/engine/test_matrix.py[async",
    "tests/engine/test_matrix.py[marked-async",
    "tests/sim/test_sim.py",
)


# Files in tests/engine that do not use the engine that the other files share.
OF_THEIR_OWN = (
    "chat_rendering",
    "connectors",
    "copied_effort",
    "data_parallel",
    "examples",
    "handover",
    "masks",
    "matrix",
    "needs",
    "replicated",
    "served",
    "stop_strings",
    "templates",
)
# Files in tests/engine whose tests break the agent, the engine or the control plane. The files share a second engine,
# so that both halves run side by side.
UNDER_FAULTS = ("fail_static", "faults", "foreign", "hostile", "inner_faults")
# Files in tests/engine whose engines are servers in processes of their own; the files share some of these servers.
SERVERS = ("client_ids", "effort", "embeddings", "gateway", "later_turns", "names", "paused", "primes")


def group(nodeid: str) -> str:
    """Return the group of a test; tests of one group run in one process, one after the other.

    Groups are: the tests on each of the two shared engines, those on servers, those of one build of the engine matrix,
    and otherwise those of one file, whose module-wide fixtures start only once.
    """
    path, _, test = nodeid.partition("::")
    folder, _, file = path.rpartition("/")
    name = file.removeprefix("test_").removesuffix(".py")
    if file == "test_matrix.py":
        return f"{path}[{test.partition('[')[2].partition(':')[0]}"
    if folder == "tests/engine" and name not in OF_THEIR_OWN:
        return "servers" if name in SERVERS else "engine under faults" if name in UNDER_FAULTS else "engine"
    return path


@pytest.fixture(autouse=True)
def all_log_lines() -> None:
    """Let the agent's log have all its lines again: its limit holds for a process, which runs many tests."""
    for one in logging.getLogger("vllm.meridian").filters:
        if isinstance(one, PlainLog):
            one._kinds.clear()


# gRPC servers of failed tests, which no test stops any more.
_UNSTOPPED: list[grpc.aio.Server] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep the gRPC servers that run while a test fails until the process ends.

    A traceback holds them beyond the end of their event loop. The destructor of a running server fails then, in the
    middle of another test; and the destructor of the last gRPC object waits for its calls for ever, which the reference
    that `init_grpc_aio` takes prevents.
    """
    if call.excinfo is not None and not call.excinfo.errisinstance(pytest.skip.Exception):
        loop = asyncio.new_event_loop()
        loop.run_until_complete(_hold_grpc())
        loop.close()
        _UNSTOPPED.extend(one for one in gc.get_objects() if grpc.aio.Server in type(one).__mro__)
    return (yield)


async def _hold_grpc() -> None:
    grpc.aio.init_grpc_aio()


def pytest_configure(config: pytest.Config) -> None:
    """In the first test process, start the process that forks programs for all of them."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        servers = Servers(ENGINE_ENV)
        config.add_cleanup(servers.stop)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    """Let the test processes be forked from the process that has imported vLLM, which their tests import, too."""
    for spec in specs:
        spec.python = shlex.join(TEST_PROCESS)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Let one of several test processes collect first; the others then find the tests' files compiled."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    with Path(os.environ[FOLDER], "collection").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(file, fcntl.LOCK_SH)
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the tests if several processes run them; a single process keeps the usual order."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        place = {name: number for number, name in enumerate(FIRST)}
        items.sort(key=lambda item: place.get(group(item.nodeid), len(place)))


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over all modules and tests, which stay until the process ends.

    Each full collection would go through more than a million objects of torch and vLLM. At the exit of the process
    these objects are collected as usual, because torch's modules would report them as leaked.
    """
    gc.freeze()
    atexit.register(gc.unfreeze)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return the scheduler of xdist's `--dist loadscope`, with this module's groups as scopes."""
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    class Groups(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return group(nodeid)

    return Groups(config, log) if config.getvalue("dist") == "loadscope" else None


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """Start one PostgreSQL server for the session when the first test requests it."""
    server = Postgres()
    yield server
    server.stop()


@pytest.fixture
def postgres_address(postgres: Postgres) -> str:
    """Return the address of a database without rows."""
    return postgres.database()


@pytest.fixture(scope="session")
def stock_tokens(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the file into which stock vLLM's greedy tokens are written, while a governed engine starts.

    If there are several test processes, the first one that requests the file has it made.
    """
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
def stock(whole_stock: list[list[int]]) -> list[list[int]]:
    """Return stock's first tokens for `tests.engine.cases()`, as many as `test_equality.GREEDY` asks for."""
    return [tokens[:FIRST_TOKENS] for tokens in whole_stock]


@pytest.fixture(scope="session")
def whole_stock(stock_tokens: Path) -> list[list[int]]:
    """Return the greedy token ids of stock vLLM for `tests.engine.cases()`."""
    try:
        wait_for(stock_tokens.exists, 100, "stock vLLM's tokens")
    except TimeoutError:
        raise AssertionError(stock_tokens.with_suffix(".log").read_text()[-3000:]) from None
    tokens: list[list[int]] = json.loads(stock_tokens.read_text())
    return tokens
