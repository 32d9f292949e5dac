"""The store as a state machine: whatever writers do at once, and however often PostgreSQL is killed, revisions go up by
one and acknowledged revisions never change."""

import asyncio
import tempfile
from collections.abc import Coroutine
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from meridian_control.common.errors import EtagMismatch, InvalidRequest, StoreUnavailable
from meridian_control.policy.model import Policy
from meridian_control.policy.store import PolicyStore, StoredRevision
from meridian_control.storage.database import Database
from tests.postgres import Postgres

T = TypeVar("T")
NOW = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)
POLICIES = [Policy.model_validate({"fallback": {"lease_ms": 100 + n}}) for n in range(4)]
WRITERS = st.lists(
    st.tuples(st.integers(0, 1), st.sampled_from(POLICIES), st.booleans(), st.sampled_from(["", "", "a", "b", "c"])),
    min_size=1,
    max_size=6,
)


class StoreMachine(RuleBasedStateMachine):
    """Two stores over one database, as two replicas have."""

    address: str

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        # Acknowledged revisions by their number, and by the request id of the acknowledged call.
        self.known: dict[int, StoredRevision] = {}
        self.by_request: dict[str, StoredRevision] = {}
        self.stores = [PolicyStore(self.run(Database.open(self.address))) for _ in range(2)]
        self.newest = 0

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(coroutine)

    async def write(self, writers: list[tuple[int, Policy, bool, str]]) -> list[Any]:
        """Make all writes at once, some with the newest etag, and return the result of each."""
        current = await self.stores[0].current()
        etag = "" if current is None else current.etag
        appends = [
            self.stores[which].append(
                policy, etag=etag if checked else "", author="", reason="", now=NOW, request_id=request_id
            )
            for which, policy, checked, request_id in writers
        ]
        return await asyncio.gather(*appends, return_exceptions=True)

    def settle(self, writers: list[tuple[int, Policy, bool, str]], results: list[Any]) -> None:
        for (_, policy, checked, request_id), result in zip(writers, results, strict=True):
            if isinstance(result, StoredRevision):
                assert result.policy == policy
                assert self.known.setdefault(result.revision, result) == result
                if request_id:
                    assert self.by_request.setdefault(request_id, result) == result
            elif isinstance(result, EtagMismatch):
                assert checked
            elif isinstance(result, InvalidRequest):
                assert request_id
            else:
                assert isinstance(result, StoreUnavailable), result
        # One of the calls with one etag wins; a repeated call needs no etag, and the first revision has none before it.
        given = [isinstance(r, StoredRevision) for w, r in zip(writers, results, strict=True) if w[2] and not w[3]]
        assert sum(given) <= 1 or not self.newest

    @rule(writers=WRITERS)
    def writers_at_once(self, writers: list[tuple[int, Policy, bool, str]]) -> None:
        results = self.run(self.write(writers))
        assert not [result for result in results if isinstance(result, StoreUnavailable)]
        self.settle(writers, results)
        fresh = [w for w, result in zip(writers, results, strict=True) if isinstance(result, StoredRevision)]
        assert fresh or all(checked or request_id for _, _, checked, request_id in writers)

    @rule(which=st.integers(0, 1))
    def replica_restarts(self, which: int) -> None:
        self.run(self.stores[which].database.close())
        self.stores[which] = PolicyStore(self.run(Database.open(self.address)))

    @rule(which=st.integers(0, 1), page=st.integers(1, 3))
    def pages(self, which: int, page: int) -> None:
        found: list[int] = []
        before = None
        while headers := self.run(self.stores[which].history(page, before)):
            found += [header.revision for header in headers]
            before = found[-1]
        assert found == list(range(self.newest, 0, -1))

    @invariant()
    def nothing_is_lost(self) -> None:
        for store in self.stores:
            history = self.run(store.history(10_000))
            revisions = [header.revision for header in history]
            assert revisions == list(range(len(revisions), 0, -1))
            assert len(revisions) >= self.newest, "revisions went backwards"
            self.newest = len(revisions)
        for revision, stored in self.known.items():
            assert self.run(self.stores[0].get(revision)) == stored

    def teardown(self) -> None:
        for store in self.stores:
            self.run(store.database.close())
        self.runner.close()


class PostgresMachine(StoreMachine):
    postgres: Postgres

    def __init__(self) -> None:
        type(self).address = self.postgres.database()
        self.kills = 0
        super().__init__()

    @precondition(lambda self: self.kills < 2)
    @rule(writers=WRITERS, delay_ms=st.integers(0, 20))
    def postgresql_is_killed(self, writers: list[tuple[int, Policy, bool, str]], delay_ms: int) -> None:
        self.kills += 1

        async def killed_meanwhile() -> list[Any]:
            writing = asyncio.create_task(self.write(writers))
            await asyncio.sleep(delay_ms / 1000)
            self.postgres.kill()
            try:
                return await writing
            except StoreUnavailable as error:
                return [error] * len(writers)

        results = self.run(killed_meanwhile())
        self.postgres.start()
        self.settle(writers, results)


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_the_store_keeps_its_promises(kind: str, request: pytest.FixtureRequest) -> None:
    quick = settings(
        max_examples=8,
        stateful_step_count=15,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        # A shorter example takes minutes to find.
        phases=[Phase.generate],
    )
    if kind == "postgresql":
        PostgresMachine.postgres = request.getfixturevalue("postgres")
        run_state_machine_as_test(PostgresMachine, settings=settings(quick, max_examples=3))
        return
    with tempfile.TemporaryDirectory() as folder:
        paths = iter(range(10_000))

        class FileMachine(StoreMachine):
            def __init__(self) -> None:
                type(self).address = f"sqlite+aiosqlite:///{Path(folder) / str(next(paths))}.db"
                super().__init__()

        run_state_machine_as_test(FileMachine, settings=quick)
