"""A sample of the hostile agents on a real server: each ends at most its own stream, with INVALID_ARGUMENT."""

from __future__ import annotations

import asyncio
from itertools import groupby
from pathlib import Path

import grpc
from meridian.v1 import agent_pb2, agent_pb2_grpc

from tests.contract.streams import Clock, controlling
from tests.fakes.linked import LinkedEngine, until
from tests.fuzz.targets import TARGETS

SEEDS = range(40)
ALLOWED = {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT}


def stream(target: str, messages: list[agent_pb2.ConnectRequest]) -> grpc.StatusCode:
    """Send all messages on one stream and return the status with which it ends."""
    with grpc.insecure_channel(target) as channel:
        call = agent_pb2_grpc.AgentServiceStub(channel).Connect(iter(messages))
        try:
            for _ in call:
                pass
        except grpc.RpcError:
            pass
        return call.code()


async def test_hostile_agents_end_their_own_streams_only(tmp_path: Path) -> None:
    ends = []
    async with controlling(tmp_path / "meridian.db") as control:
        # The engine makes no step meanwhile, and nothing that it has reported before is answered.
        with LinkedEngine([control.target], "good", clock=Clock()) as engine:
            engine.open("a", own_cap=50)
            await engine.steps_until(engine.caps)
            for seed in SEEDS:
                said = [r for r in TARGETS["control"].case(seed) if r.HasField("up")]
                for _, records in groupby(said, key=lambda record: record.session_id):
                    ends.append(await asyncio.to_thread(stream, control.target, [record.up for record in records]))
            assert set(ends) == ALLOWED
            engine.open("b")
            await engine.steps_until(lambda: control.names() == ["a", "b"])
            assert engine.streams == 1
            await until(lambda: len(control.fleet.connections) == 1)
