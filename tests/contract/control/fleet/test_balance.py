"""Replicas send engines to each other while one of them has too many."""

from __future__ import annotations

from contextlib import AsyncExitStack

import grpc

from tests.contract.raw_engine import RawEngine
from tests.fakes.linked import until
from tests.replicated import Replicated, client, until_answer


async def test_a_replica_that_is_added_gets_engines(replicated: Replicated) -> None:
    """12 engines of one replica are too many beside one without engines, and 10 are not."""
    one = await replicated.started()
    async with AsyncExitStack() as open_, client(one) as asked:
        channel = await open_.enter_async_context(grpc.aio.insecure_channel(one.target))
        for number in range(12):
            await RawEngine(channel, f"e{number}").welcomed()
        await replicated.started()
        await until(lambda: "2 of 12 engines are sent to other replicas: the mean is 6.0" in one.log())

        async def connected() -> int:
            return len(await asked.connected())

        await until_answer(connected, 10)
