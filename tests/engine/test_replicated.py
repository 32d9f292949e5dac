"""A real vLLM server and simulated agents under two replicas on a real PostgreSQL: the policy changes, a replica is
killed in the middle, and nobody's request notices."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
from meridian.v1 import policy_pb2

from tests.engine.test_served import ROUNDS, Served, all_of
from tests.fakes.linked import LinkedEngine
from tests.processes import wait_for
from tests.replicated import Client, Replicated, client, until_answer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.contract.test_server import Process
    from tests.postgres import Postgres

SIMULATED = [f"simulated-{number}" for number in range(6)]


@pytest.fixture(scope="module")
def replicas(folder: Path, postgres: Postgres) -> Iterator[tuple[Process, Process]]:
    replicated = Replicated(folder / "replicated", postgres)
    replicated.folder.mkdir()
    yield asyncio.run(replicated.pair())
    for process in replicated.processes:
        process.kill()


@pytest.fixture(scope="module")
def served(folder: Path, replicas: tuple[Process, Process]) -> Iterator[Served]:
    served = Served(folder / "replicated", ",".join(process.target for process in replicas))
    wait_for(served.ready, 180, "vLLM to serve")
    yield served
    served.process.stop()


def capped(tokens: int) -> policy_pb2.UpdatePolicyRequest:
    scheduler = policy_pb2.SchedulerPolicy(max_think_tokens=tokens)
    return policy_pb2.UpdatePolicyRequest(policy=policy_pb2.Policy(scheduler=scheduler))


async def _acked(asked: Client) -> dict[str, int]:
    return {e.engine_id: e.acked_revision for e in (await asked.engines()).engines}


async def test_a_replica_is_killed_between_two_changes(served: Served, replicas: tuple[Process, Process]) -> None:
    one, two = replicas
    targets = [one.target, two.target]
    with ExitStack() as stack:
        for number, name in enumerate(SIMULATED):
            order = targets if number % 2 else targets[::-1]
            stack.enter_context(LinkedEngine(order, name))
        async with client(one) as asked_one, client(two) as asked_two:
            names = sorted([*SIMULATED, "served"])
            await until_answer(lambda: _acked(asked_one), dict.fromkeys(names, 1))
            alone = await all_of(served)
            await asked_two.policy.UpdatePolicy(capped(12))
            await until_answer(lambda: _acked(asked_one), dict.fromkeys(names, 2))
            assert all(len(reasoning.split()) <= 12 for reasoning, _, _ in await all_of(served))
            await asked_two.policy.UpdatePolicy(capped(10_000))
            await until_answer(lambda: _acked(asked_one), dict.fromkeys(names, 3))

            where = await asked_one.connected()
            (own,) = {e.replica for e in (await asked_one.engines(local_only=True)).engines}
            doomed, asked = (one, asked_two) if where["served"] == own else (two, asked_one)
            streaming = asyncio.gather(*(all_of(served) for _ in range(ROUNDS)))
            async with asyncio.timeout(20):
                while not await asked.requests(engine_id="served"):
                    await asyncio.sleep(0.01)
            doomed.kill()
            assert not streaming.done()
            assert await streaming == [alone] * ROUNDS, "as if nothing had happened"

            await until_answer(lambda: _acked(asked), dict.fromkeys(names, 3))
            assert len(set((await asked.connected()).values())) == 1
            await asked.policy.UpdatePolicy(capped(20))
            await until_answer(lambda: _acked(asked), dict.fromkeys(names, 4))
            assert all(len(reasoning.split()) <= 20 for reasoning, _, _ in await all_of(served))
