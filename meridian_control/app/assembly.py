"""The composition root makes every part of a control plane once and hands each part the parts that it needs.

`build` makes the parts around a given store and fleet, so that tests can use it; `assemble` also reads the flags.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING

from meridian_control.app.background import Job
from meridian_control.app.flags import advertised, engine_limits, everybody_may_change, memory_limits
from meridian_control.capabilities import listed
from meridian_control.common.client_credentials import ClientCredentials
from meridian_control.fleet.balance import Balance
from meridian_control.fleet.fleet import Fleet
from meridian_control.fleet.freeze_store import FreezeStore
from meridian_control.fleet.known_engines import KnownEngines
from meridian_control.fleet.membership import Replica, Replicas, new_id
from meridian_control.fleet.part import Beside, keep_ticking
from meridian_control.fleet.peers import Peers
from meridian_control.fleet.whole_fleet import WholeFleet
from meridian_control.policy.directory import PolicyDirectory, initial_policy
from meridian_control.policy.store import PolicyStore
from meridian_control.rollout.driver import Rollouts
from meridian_control.rollout.store import RolloutStore
from meridian_control.server.roles import Access
from meridian_control.server.server import ControlServer
from meridian_control.storage.database import Database

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence
    from contextlib import AsyncExitStack

    import grpc

    from meridian_control.journal.log import DecisionLog
    from meridian_control.server.interceptor import Gate
    from meridian_control.server.rate_limits import CallLimits

# Linux's monotonic clock stands still while the machine is suspended, and this clock does not.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class SteadyClock:
    """Returns a time that starts at `began`, an aware time, and from then on advances as seconds pass.

    Durations and the order of events within a process come from such a clock, because the time of day may be set back
    or forward while the process runs. elapsed_s: returns seconds that only grow.
    """

    def __init__(self, began: datetime, elapsed_s: Callable[[], float] = lambda: time.clock_gettime(_CLOCK)) -> None:
        self._began, self._elapsed_s = began, elapsed_s
        self._began_s = elapsed_s()

    def __call__(self) -> datetime:
        return self._began + timedelta(seconds=self._elapsed_s() - self._began_s)


@dataclass(frozen=True)
class Parts:
    """The parts of one control plane.

    `replicas` is None if the store is a SQLite file, which allows one replica. `directory` is None without
    `--policy-dir`.
    """

    store: PolicyStore
    whole: WholeFleet
    rollouts: Rollouts
    freezes: FreezeStore
    known: KnownEngines
    gate: Gate
    server: ControlServer
    replicas: Replicas | None
    directory: PolicyDirectory | None

    async def look(self) -> None:
        """Read the active rollout, the freezes in force, the engines that were known, and what capabilities need, from
        the store, and hand them to the fleet.

        Call `look` before engines connect, because the engines of a rollout's group must not get an older revision.
        Raises StoreUnavailable, StoredPolicyUnreadable.
        """
        await self.rollouts.look()
        await self.freezes.look()
        for part in self.whole.fleet.parts.values():
            await part.begin()
        await self.known.look()

    def jobs(self) -> list[Job]:
        """Return the jobs that run beside the server."""
        fleet = self.whole.fleet
        more = []
        if (replicas := self.replicas) is not None:
            balance = Balance(fleet, lambda: replicas.engines_of_others)
            more = [
                Job("the membership of replicas", replicas.run, True),
                Job("the balance of replicas", balance.run),
            ]
        more += [Job("the policy directory", self.directory.watch)] if self.directory is not None else []
        return [
            Job("other replicas' policies and rollouts", self.rollouts.follow, True),
            Job("other replicas' freezes", self.freezes.follow, True),
            Job("rollouts", self.rollouts.drive),
            *(Job(name, partial(keep_ticking, part)) for name, part in fleet.parts.items()),
            Job("engines without requests", fleet.keep_resting),
            Job("the known engines", self.known.run),
            Job("the delay of the event loop", fleet.loop_delay.run),
            Job("the roles of callers", self.gate.keep_checking),
            *more,
        ]


def build(
    store: PolicyStore,
    whole: WholeFleet,
    clock: Callable[[], datetime],
    access: Access | None = None,
    limits: CallLimits | None = None,
    *,
    replicas: Replicas | None = None,
    directory: PolicyDirectory | None = None,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
) -> Parts:
    """Make the parts of a control plane around a store and a fleet.

    `clock` gives the time of day, for the times that records show. Whatever measures a duration or compares times uses
    the clock of the fleet, which is not set back or forward.
    """
    fleet, database = whole.fleet, store.database
    freezes = FreezeStore(database, fleet.clock, fleet.freezes.renew)
    fleet.freezes.look = freezes.look
    fence = replicas.fence if replicas is not None else None
    rollouts = Rollouts(RolloutStore(store), fleet, fleet.clock, whole.led_engines, whole.leads, fence=fence)
    server = ControlServer(
        store, whole, rollouts, freezes, clock, access=access, limits=limits, interceptors=interceptors
    )
    for part in fleet.parts.values():
        part.attach(Beside(whole.replica_id, whole.peers, whole.leads, rollouts, database, clock))
    known = KnownEngines(database, fleet)
    return Parts(store, whole, rollouts, freezes, known, server.gate, server, replicas, directory)


async def assemble(
    args: argparse.Namespace,
    log: DecisionLog,
    ending: AsyncExitStack,
    interceptors: Sequence[grpc.aio.ServerInterceptor],
) -> Parts:
    """Open the store and make all parts; `ending` closes them. Raises MeridianError, OSError or ValueError."""
    access = Access(args.access, everybody=everybody_may_change(args), certificates=bool(args.client_ca))
    if not args.store.strip():
        raise ValueError("--store must name a SQLite file or a PostgreSQL database; got ''")
    shared = "://" in args.store
    database = await Database.open(args.store if shared else f"sqlite+aiosqlite:///{args.store}", args.listen)
    ending.push_async_callback(database.close)
    store = PolicyStore(database, listed.sections())
    steady = SteadyClock(await database.now())
    memory = memory_limits(args)
    fleet = Fleet(
        steady,
        revision=store.get,
        decisions=log,
        heartbeat_s=args.heartbeat,
        memory=memory,
        capabilities=listed.CAPABILITIES,
    )
    directory = PolicyDirectory(args.policy_dir, store, fleet.set_policy, clock) if args.policy_dir else None
    fleet.set_policy(await (directory.put_in_force() if directory else initial_policy(store, args.policy, clock())))
    me = Replica(new_id(), advertised(args.advertise, args.listen) if shared else "")
    replicas = Replicas(database, me, engines=lambda: len(fleet.connections)) if shared else None
    whole = _whole(fleet, me, replicas, ending)
    limits = engine_limits(args)
    parts = build(
        store, whole, clock, access, limits, replicas=replicas, directory=directory, interceptors=interceptors
    )
    await parts.look()
    return parts


def _whole(fleet: Fleet, me: Replica, replicas: Replicas | None, ending: AsyncExitStack) -> WholeFleet:
    if replicas is None:
        return WholeFleet(fleet, me.replica_id, None, lambda: True)
    peers = Peers(lambda: replicas.others, ClientCredentials.from_environment(), lambda: replicas.silent)
    ending.push_async_callback(peers.close)
    return WholeFleet(fleet, me.replica_id, peers, replicas.leads)


def clock() -> datetime:
    return datetime.now(UTC)
