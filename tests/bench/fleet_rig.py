"""One setting of `make bench-fleet`: replicas on PostgreSQL, simulated engines, and the order of what is measured.

The module owns the replicas' processes and the figures of a setting; `fleet_engines` has the engines.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg  # type: ignore[import-untyped]
import grpc
import numpy as np
from meridian.v1 import fleet_pb2, fleet_pb2_grpc, policy_pb2, policy_pb2_grpc

from tests.bench.fleet_engines import STEP_MS, Counts, Engine, Fleet
from tests.bench.fleet_tape import Report
from tests.bench.harness import BenchError, Figures
from tests.bench.machine import TICKS_PER_S, rss_mb, ticks_of, tree_ticks
from tests.postgres import Postgres
from tests.processes import Control

# Share of the replicas' cores that they use while the engines play, if the factor is not given.
BUSY_SHARE = 0.6
# Cores that an engine at full speed is taken to need before the pilot has measured it; and the length of the pilot.
GUESSED_CORES, PILOT_S = 0.025, 8.0
SETTLE_S, TIMEOUT_S = 1.0, 600.0
MEMORY_MIB = 1 << 16
# Cap of the changed policy, which no request of a tape reaches.
CAP_TOKENS = 30_000
# Longest pause after a change of the policy.
PAUSE_S = 2.0
# Time without a change after which control plane and engines will not agree on the open decisions any more.
QUIET_S = 30.0


@dataclass(frozen=True)
class Windows:
    """The lengths of the windows in seconds.

    slower: factor by which engines are slower than real ones; 0 to measure it.
    """

    slower: float = 0.0
    seconds: float = 20.0
    idle_s: float = 5.0


@dataclass(frozen=True)
class Usage:
    """The processor time used so far, in seconds: by each replica, by PostgreSQL, and by this process."""

    replicas: tuple[float, ...]
    postgres: float
    engines: float
    at_s: float

    def since(self, before: Usage) -> Usage:
        replicas = tuple(now - then for now, then in zip(self.replicas, before.replicas, strict=True))
        postgres, engines = self.postgres - before.postgres, self.engines - before.engines
        return Usage(replicas, postgres, engines, self.at_s - before.at_s)

    @property
    def cores(self) -> float:
        """The cores that all replicas used together."""
        return sum(self.replicas) / self.at_s


@dataclass(frozen=True)
class Silence:
    """The cores that all replicas use while the engines are silent, and the seconds of processor time to ask them what
    they have received."""

    cores: float
    look_s: float


class Rig:
    """One setting: replicas on a database of their own, and the engines. usable: the machine's cores; the replicas have
    any core if it is empty."""

    def __init__(
        self,
        engines: int,
        replicas: int,
        usable: Sequence[int],
        windows: Windows,
        tapes: Sequence[Sequence[Report]],
    ) -> None:
        self.engines, self.replicas, self.windows, self.tapes = engines, replicas, windows, tapes
        self.controls: list[Control] = []
        self.postgres: Postgres | None = None
        # Cores of the replicas; engines and PostgreSQL have the others, as far as there are any.
        self.cores = set(usable[: max(1, min(replicas, len(usable) - 1))])

    async def start(self, folder: Path, postgres: Postgres | None = None) -> None:
        """Start the replicas, on SQLite without PostgreSQL."""
        self.postgres = postgres
        # All engines have one address, so they are one caller, whose bounds must not be what is measured.
        places = str(self.engines)
        flags = ["--max-engines", places, "--max-engines-per-caller", places]
        flags += ["--max-caller-mib", str(MEMORY_MIB), "--max-engines-mib", str(MEMORY_MIB)]
        if postgres is not None:
            self.database = await asyncio.to_thread(postgres.database)
            flags += ["--store", self.database]
        for number in range(self.replicas):
            (own := folder / str(number)).mkdir(parents=True)
            self.controls.append(await asyncio.to_thread(Control, own, None, flags, self.cores or None))
        self.begin(self.controls)

    def begin(self, controls: list[Control]) -> None:
        """Take servers that run already, and make the engines."""
        self.controls = controls
        self.fleet = Fleet(self.engines, [control.target for control in self.controls], self.tapes)

    async def connect(self, decided: bool = True) -> float:
        """Connect all engines, then let them begin with their requests; return the replicas' memory in between.
        decided: wait until the control plane has decided on them."""
        self.fleet.connect()
        await self.until(lambda engine: engine.governed, "to connect")
        empty_mb = self.rss_mb()
        for engine in self.fleet.engines:
            await engine.load()
        if decided:
            await self.until(lambda engine: engine.answered, "to have caps")
        return empty_mb

    async def close(self) -> None:
        await self.fleet.close()
        for control in self.controls:
            await asyncio.to_thread(control.process.kill)

    async def until(self, reached: Callable[[Engine], bool], what: str, among: Sequence[Engine] = ()) -> None:
        """Wait until a condition holds for all engines, or for those of `among`. Raises BenchError."""
        deadline = time.monotonic() + TIMEOUT_S
        waiting = list(among or self.fleet.engines)
        while waiting := [engine for engine in waiting if not reached(engine)]:
            if self.fleet.errors:
                raise BenchError(f"an engine has failed: {self.fleet.errors[0]!r}")
            if time.monotonic() > deadline:
                raise BenchError(f"{len(waiting)} of {self.engines} engines: not within {TIMEOUT_S:g} s: {what}")
            await asyncio.sleep(0.05)

    def usage(self) -> Usage:
        """Return the processor time so far, by the kernel's account."""
        replicas = tuple(ticks_of(control.process.popen.pid) / TICKS_PER_S for control in self.controls)
        postgres = 0 if self.postgres is None else tree_ticks(self.postgres.process.pid)
        engines = ticks_of(os.getpid())
        return Usage(replicas, postgres / TICKS_PER_S, engines / TICKS_PER_S, time.monotonic())

    def rss_mb(self) -> float:
        return sum(rss_mb(control.process.popen.pid) for control in self.controls)

    async def received(self) -> float:
        """Return the seconds of engines at full speed whose tokens the replicas have received so far."""
        listed = [engine for control in self.controls for engine in await _listed(control)]
        return sum(engine.token_events for engine in listed) / len(self.tapes[0][0].numbers) * STEP_MS / 1e3

    async def looked(self) -> tuple[float, Usage]:
        """Return what the replicas have received so far, and the processor time so far."""
        return await self.received(), self.usage()

    async def used(self, seconds: float) -> Usage:
        """Return the processor time of the next seconds."""
        before = self.usage()
        await asyncio.sleep(seconds)
        return self.usage().since(before)

    async def database_state(self) -> tuple[int, int, int]:
        """Return the rows that were written in the database so far, the bytes of PostgreSQL's log of changes, and the
        replicas' open connections."""
        connection = await asyncpg.connect(self.database)
        try:
            row = await connection.fetchrow(
                "SELECT tup_inserted + tup_updated + tup_deleted, pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0'), "
                "numbackends - 1 FROM pg_stat_database WHERE datname = current_database()"
            )
        finally:
            await connection.close()
        return int(row[0]), int(row[1]), int(row[2])

    async def update(self) -> list[float]:
        """Change the cap of all requests; return the seconds until each engine has applied the change, ascending."""
        policy = policy_pb2.Policy(scheduler=policy_pb2.SchedulerPolicy(max_think_tokens=CAP_TOKENS))
        async with grpc.aio.insecure_channel(self.controls[0].target) as channel:
            stub: Any = policy_pb2_grpc.PolicyServiceStub(channel)
            called_s = time.monotonic()
            answer = await stub.UpdatePolicy(policy_pb2.UpdatePolicyRequest(policy=policy))
        revision = answer.revision.revision
        await self.until(lambda engine: engine.acked[0] >= revision, f"revision {revision}")
        return sorted(engine.acked[1] - called_s for engine in self.fleet.engines)

    async def kill(self) -> list[float]:
        """Kill the last replica; return the seconds until each of its engines is governed again, ascending."""
        killed = self.controls.pop()
        moving = [(engine, engine.streams) for engine in self.fleet.engines if engine.target == killed.target]
        killed_s = time.monotonic()
        await asyncio.to_thread(killed.process.kill)
        streams = dict(moving)
        await self.until(lambda e: e.streams > streams[e] and e.answered, "to move", [e for e, _ in moving])
        return sorted(engine.acked[1] - killed_s for engine, _ in moving)

    async def lost(self) -> int:
        """Return the engines that no replica has, and the decisions on which a replica and an engine disagree, once no
        report is under way: after QUIET_S in which nothing has changed."""
        before, since_s = None, 0.0
        while True:
            listed = [engine for control in self.controls for engine in await _listed(control)]
            held = {engine.engine_id: engine.open_decisions for engine in listed}
            own = {engine.engine_id: engine.open_decisions for engine in self.fleet.engines}
            missing = len(own.keys() - held.keys())
            wrong = sum(abs(own[engine] - open_decisions) for engine, open_decisions in held.items())
            now = time.monotonic()
            if (held, own) != before:
                before, since_s = (held, own), now
            if not missing + wrong or now - since_s > QUIET_S:
                return missing + wrong
            await asyncio.sleep(SETTLE_S)


async def _listed(control: Control) -> list[fleet_pb2.Engine]:
    """Return the engines that are connected to a replica; it answers `local_only` with all of them on one page."""
    async with grpc.aio.insecure_channel(control.target, [("grpc.max_receive_message_length", -1)]) as channel:
        stub: Any = fleet_pb2_grpc.FleetServiceStub(channel)
        answer = await stub.ListEngines(fleet_pb2.ListEnginesRequest(local_only=True))
    return [engine for engine in answer.engines if engine.state == fleet_pb2.CONNECTION_STATE_CONNECTED]


async def measure(rig: Rig, folder: Path, postgres: Postgres, say: Callable[[str], None] = lambda _: None) -> Figures:
    """Return the figures of one setting. Those in `_s` are per second of an engine at full speed, unless they are
    times.

    slower: factor by which engines were slower. cpu_ms: milliseconds of the replicas' processor time for one engine and
    second; idle_ms: the part of a silent stream. base_cores: of a replica without engines. cores: used by all replicas;
    busiest: by one of them; own_cores: by the engines. pace: share of the due steps that the engines made; received:
    share of these that the replicas received. latency_*: time from a report to its answer. mb_per_engine: with its
    requests. moved: engines of the replica that was killed; cut: decisions that had no outcome when it was killed.
    rows_s, wal_bytes_s: written by PostgreSQL per replica and second; connections: to the database, per replica. lost:
    engines that no replica has, and decisions on which a replica and an engine disagree. Raises BenchError.
    """
    try:
        await rig.start(folder, postgres)
        base_mb, base = rig.rss_mb(), await rig.used(rig.windows.idle_s)
        begun = rig.usage()
        empty_mb = await rig.connect()
        joined = rig.usage().since(begun)
        for engine in rig.fleet.engines:
            await engine.spread()
        await rig.until(lambda engine: not engine.waits, "to have an answer")
        say(f"all engines have their requests after {joined.at_s:.0f} s")
        silence = await _silence(rig)
        slower = rig.windows.slower or await _pilot(rig, silence)
        say(f"engines are {slower:g} times slower than real ones")
        found = await _window(rig, silence, slower)
        idle_s = (silence.cores - base.cores) / rig.engines
        # In a short window the replicas may need less than the kernel's account can tell.
        least_s = 1 / TICKS_PER_S / (rig.engines * rig.windows.seconds)
        full_mb = rig.rss_mb()
        found |= {
            "slower": slower,
            "cpu_ms": (cpu_ms := 1e3 * max(found.pop("cost_s") + idle_s, least_s)),
            "engines_per_core": 1e3 / cpu_ms,
            "idle_ms": 1e3 * idle_s,
            "base_cores": base.cores / rig.replicas,
            "connect_ms": 1e3 * sum(joined.replicas) / rig.engines,
            "base_mb": base_mb / rig.replicas,
            "mb_per_engine": (full_mb - base_mb) / rig.engines,
            "kb_per_request": (full_mb - empty_mb) * 1e3 / (rig.engines * len(rig.tapes[0][0].numbers)),
        }
        say("the policy changes")
        found |= await _delivery(rig, found["cores"])
        if rig.replicas > 1:
            say("a replica is killed")
            cut, moved_s = rig.fleet.counts.cut, await rig.kill()
            found |= {
                "moved": len(moved_s),
                "moved_p95_s": float(np.percentile(moved_s, 95)),
                "moved_all_s": moved_s[-1],
                "cut": rig.fleet.counts.cut - cut,
            }
        rig.fleet.pause()
        return found | {"lost": await rig.lost()}
    finally:
        await rig.close()


async def _silence(rig: Rig) -> Silence:
    used, (_, before) = await rig.used(rig.windows.idle_s), await rig.looked()
    _, after = await rig.looked()
    return Silence(used.cores, sum(after.since(before).replicas))


def cost_s(used: Usage, silence: Silence, engine_s: float) -> float:
    """Return the seconds of processor time for one second of an engine at full speed, silence left out. engine_s: the
    seconds of engines that were received; used: the time between two looks."""
    return (sum(used.replicas) - silence.cores * used.at_s - silence.look_s) / max(engine_s, 1e-9)


async def _pilot(rig: Rig, silence: Silence) -> float:
    """Return the factor at which the replicas use BUSY_SHARE of their cores."""
    share = BUSY_SHARE * max(1, len(rig.cores))
    received_s, before = await rig.looked()
    rig.fleet.play(STEP_MS / 1e3 * max(1.0, rig.engines * GUESSED_CORES / share))
    await asyncio.sleep(PILOT_S)
    received_after_s, after = await rig.looked()
    rig.fleet.pause()
    if silence.cores >= share or received_after_s <= received_s:
        raise BenchError(f"silent engines alone need {silence.cores:.2f} of {len(rig.cores)} cores")
    cost = cost_s(after.since(before), silence, received_after_s - received_s)
    return float(max(1, math.ceil(rig.engines * cost / (share - silence.cores))))


async def _window(rig: Rig, silence: Silence, slower: float) -> Figures:
    """Return the figures of the time in which all engines play and nothing else happens."""
    fleet = rig.fleet
    fleet.play(STEP_MS / 1e3 * slower)
    await asyncio.sleep(SETTLE_S)
    rows, wal_bytes, _ = await rig.database_state()
    received_s, before = await rig.looked()
    fleet.counts = counts = Counts(cut=fleet.counts.cut)
    await asyncio.sleep(rig.windows.seconds)
    await rig.until(lambda _: bool(counts.latencies_s), "an answer", fleet.engines[:1])
    # The look lists all engines of a replica at once, which holds up the reports that arrive meanwhile.
    latencies_s = list(counts.latencies_s)
    received_after_s, after = await rig.looked()
    fleet.counts = Counts(cut=counts.cut)
    received_s, used = received_after_s - received_s, after.since(before)
    rows_after, wal_after, connections = await rig.database_state()
    engine_s = counts.steps * STEP_MS / 1e3
    return {
        "cost_s": cost_s(used, silence, received_s),
        "received": received_s / engine_s,
        "cores": used.cores,
        "busiest": max(used.replicas) / used.at_s,
        "own_cores": used.engines / used.at_s,
        "postgres_cores": used.postgres / used.at_s,
        "pace": engine_s * slower / (rig.engines * used.at_s),
        "reports_s": counts.reports / engine_s,
        "answered": counts.answers / counts.reports,
        "decisions_s": counts.decisions / engine_s,
        "up_bytes_s": counts.up_bytes / engine_s,
        "down_bytes_s": counts.down_bytes / engine_s,
        "latency_p50_ms": 1e3 * float(np.percentile(latencies_s, 50)),
        "latency_p99_ms": 1e3 * float(np.percentile(latencies_s, 99)),
        "rows_s": (rows_after - rows) / used.at_s / rig.replicas,
        "wal_bytes_s": (wal_after - wal_bytes) / used.at_s / rig.replicas,
        "connections": connections / rig.replicas,
    }


async def _delivery(rig: Rig, cores: float) -> Figures:
    """Return the figures of a change of the policy while all engines play. cores: those that the reports need."""
    before, times_s = rig.usage(), await rig.update()
    await asyncio.sleep(min(PAUSE_S, rig.windows.seconds))
    used = rig.usage().since(before)
    return {
        "delivery_p95_s": float(np.percentile(times_s, 95)),
        "delivery_all_s": times_s[-1],
        "delivery_ms": 1e3 * max(0.0, sum(used.replicas) - cores * used.at_s) / rig.engines,
    }
