"""A control plane with rollouts and engines with labels, for the tests of rollouts; the tests set the clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.json_format import ParseDict
from meridian.v1 import agent_pb2, fleet_pb2, policy_pb2, rollout_pb2

from meridian_control.policy.formats import parse_toml, to_proto
from meridian_control.policy.store import PolicyStore
from meridian_control.storage.database import Database
from tests.contract.clients import OWN_CONNECTION, Clients
from tests.contract.control.app.test_server import Process
from tests.fakes.agent import hello
from tests.fakes.control import control_plane, kill, running
from tests.fakes.fleets import engines_of
from tests.fakes.linked import LinkedEngine, until
from tests.fakes.migrated import migrated

RUNNING, PAUSED, HALTED, COMPLETED, ROLLED_BACK, ABORTED = range(1, 7)
CONNECTED = fleet_pb2.CONNECTION_STATE_CONNECTED
OLD = parse_toml("fallback.lease_ms = 5000")
NEW = parse_toml("fallback.lease_ms = 6000\nengine.max_num_active_seqs = 2")
CANARY = {"engine_labels": {"pool": "canary*"}, "bake_s": 2.0}
ALL = {"percent": 100.0, "bake_s": 2.0}


class Engine(LinkedEngine):
    """An engine with labels, which asserts at its end that it never got an older revision than before."""

    def __init__(self, control: Control | Process, engine_id: str, pool: str) -> None:
        # Only the test's clock ends a lease: a busy machine may be silent for longer than these short leases.
        super().__init__([control.target], engine_id, clock=lambda: 0.0)
        self.control, self.labels = control, {"pool": pool}

    def hello(self) -> agent_pb2.Hello:
        said = {"labels": self.labels, "engine_limits": self.limits.message(), **self.said}
        return hello(self.engine_id, revision=self.link.lease.revision, **said)

    def __enter__(self) -> Engine:
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        given = [settings.revision for settings in self.settings]
        assert given == sorted(given)

    async def lose(self) -> None:
        """Break the stream off for good, and wait until the control plane in this process knows."""
        control = self.control
        assert isinstance(control, Control)
        self.link._targets[:] = ["127.0.0.1:1"]
        self.link.restart()
        await until(lambda: self.engine_id in control.fleet.departed)

    async def has(self, revision: int) -> None:
        """Wait until the engine has applied the revision and, if the control plane runs in this process, has
        acknowledged it there."""
        await until(lambda: self.link.lease.revision == revision)
        if isinstance(control := self.control, Control):
            await until(lambda: control.knows(self.engine_id, revision))


class Control:
    """A control plane in this process, whose clock moves only when a test moves it. A second `start` keeps port and
    store."""

    def __init__(self, store: PolicyStore, leads: bool = True) -> None:
        self.store, self.port, self.leads = store, 0, leads
        self.now = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)
        # How far the machine's clock was set forward since the start.
        self.ahead = timedelta()

    def clock(self) -> datetime:
        return self.now

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        if await self.store.current() is None:
            await self.store.append(OLD, etag="", author="test", reason="", now=self.now)
        self.parts = control_plane(
            self.store, self.clock, time_of_day=lambda: self.now + self.ahead, leads=lambda: self.leads
        )
        self.fleet, self.rollouts, self.server = self.parts.whole.fleet, self.parts.rollouts, self.parts.server
        await self.parts.look()
        self.port = await self.server.start(f"127.0.0.1:{self.port}")
        self.following = asyncio.create_task(self.rollouts.follow())
        self.clients = Clients(grpc.aio.insecure_channel(self.target, OWN_CONNECTION))
        self.stub, self.policy = self.clients.rollout, self.clients.policy

    async def kill(self) -> None:
        self.following.cancel()
        await self.clients.channel.close()
        await kill(self.parts)

    async def begin(self, *steps: dict[str, Any], **fields: Any) -> Any:
        return (await self.stub.StartRollout(starting(*steps, **fields))).rollout

    async def abort(self, **fields: Any) -> Any:
        return (await self.stub.AbortRollout(rollout_pb2.AbortRolloutRequest(**fields))).rollout

    async def ticks(self, count: int = 1) -> Any:
        """Advance the clock by `count` seconds with one tick of the rollout driver each, and return the rollout."""
        for _ in range(count):
            self.now += timedelta(seconds=1)
            await self.rollouts.tick()
        return await self.get()

    @property
    def newest(self) -> Any:
        """The rollout with measurements that are not stored yet."""
        return self.rollouts.newest

    async def get(self, rollout_id: int = 0) -> Any:
        return (await self.stub.GetRollout(rollout_pb2.GetRolloutRequest(rollout_id=rollout_id))).rollout

    async def in_force(self) -> Any:
        return (await self.policy.GetPolicy(policy_pb2.GetPolicyRequest())).revision

    async def step(self, engine: LinkedEngine, seconds: float, **wanted: int) -> None:
        """Make one engine step that takes `seconds`, and wait until its report has arrived."""
        self.now += timedelta(seconds=seconds)
        engine.take_inbox()
        record = engine.engine.run(wanted)
        # The report does not wait for further steps.
        record.urgent = True
        engine.send(record)
        await until(lambda: self.seen_step(engine.engine_id) == engine.engine.step)

    def knows(self, engine_id: str, revision: int) -> bool:
        known = [(e.engine_id, e.acked_revision) for e in engines_of(self.fleet) if e.state == CONNECTED]
        return (engine_id, revision) in known

    def active_seqs(self) -> dict[str, int]:
        """Return how many requests each engine may run at once."""
        return {e.engine_id: e.engine_limits[0].in_force for e in engines_of(self.fleet)}

    def seen_step(self, engine_id: str) -> int:
        return max((e.step for e in engines_of(self.fleet) if e.engine_id == engine_id), default=0)


def starting(*steps: dict[str, Any], **fields: Any) -> rollout_pb2.StartRolloutRequest:
    guardrails, on_violation = fields.pop("guardrails", {}), fields.pop("on_violation", "rollback")
    plan = {"step": steps, "guardrails": guardrails, "on_violation": on_violation}
    request = {"policy": to_proto(NEW), "plan": ParseDict(plan, rollout_pb2.RolloutPlan()), **fields}
    return rollout_pb2.StartRolloutRequest(**request)


@asynccontextmanager
async def controlling(address: str, leads: bool = True) -> AsyncIterator[Control]:
    store = PolicyStore(await Database.open(address))
    control = Control(store, leads)
    async with running(control):
        yield control


@pytest.fixture
async def control(tmp_path: Path) -> AsyncIterator[Control]:
    """Yield a control plane on a file."""
    async with controlling(migrated(tmp_path / "m.db")) as control:
        yield control
