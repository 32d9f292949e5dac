"""`meridian-control`: the composition root. Wires store, fleet and server as the flags say, and runs them on one event
loop until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY, disable_created_metrics, start_http_server

from meridian_control.access.client_credentials import ClientCredentials
from meridian_control.access.rate_limits import CallLimits
from meridian_control.access.roles import Access
from meridian_control.app.flags import (
    access_notice,
    advertised,
    bindable,
    everybody_may_change,
    listener,
    page_address,
    parser,
    split_address,
)
from meridian_control.cluster.cluster_fleet import WholeFleet
from meridian_control.cluster.membership import Replica, Replicas, new_id
from meridian_control.cluster.peers import Peers
from meridian_control.common.errors import EtagMismatch, MeridianError, StoreUnavailable
from meridian_control.decision_log.jsonl_file import decision_file
from meridian_control.decision_log.log import DecisionLog
from meridian_control.fleet.fleet import Fleet
from meridian_control.policy import formats as forms
from meridian_control.policy import model
from meridian_control.policy.directory import PolicyDirectory
from meridian_control.policy.store import EMPTY_ETAG, PolicyStore, StoredRevision
from meridian_control.rollout.driver import Rollouts
from meridian_control.rollout.store import RolloutStore
from meridian_control.server.server import ControlServer
from meridian_control.status_page.server import StatusPage
from meridian_control.storage.database import Database
from meridian_control.telemetry.fleet_metrics import FleetCollector
from meridian_control.telemetry.grpc_metrics import ServerMetrics

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from meridian_control.decision_log.records import Life

logger = logging.getLogger("meridian_control")

STOP_GRACE_S = 5.0
# How long a database that does not answer may keep a replica from ending.
LEAVE_S = 2.0


def clock() -> datetime:
    return datetime.now(UTC)


async def initial_policy(store: PolicyStore, path: Path | None) -> StoredRevision:
    """The policy in the store; an empty store begins with the policy file, or the defaults where there is none."""
    found = forms.find(path)
    wanted = forms.load(found) if found is not None else model.Policy()
    source = str(found) if found is not None else "defaults"
    current = await store.current()
    while current is None:
        # One replica is first, where several start at once.
        with suppress(EtagMismatch):
            await store.append(wanted, etag=EMPTY_ETAG, author="meridian-control", reason=source, now=clock())
        current = await store.current()
    if found is not None and current.policy != wanted:
        logger.warning("revision %d of the store is in force, not %s: use meridianctl", current.revision, found)
    return current


@contextmanager
def traces(endpoint: str | None, ratio: float) -> Iterator[Callable[[Life], None] | None]:
    """Where lives go that are over; None without an endpoint. Raises ValueError."""
    if not endpoint:
        yield None
        return
    if not 0 <= ratio <= 1:
        raise ValueError(f"--trace-ratio must be from 0 to 1; got {ratio}")
    try:
        from meridian_control.telemetry.request_traces import Tracing
    except ImportError as error:
        raise ValueError(f"--otlp-endpoint needs the extra meridian-llm[traces]: {error}") from error
    tracing = Tracing(endpoint, ratio)
    try:
        yield tracing.over
    finally:
        tracing.stop()


def serve_metrics(address: str, whole: WholeFleet, rollouts: Rollouts, faults: Mapping[str, int]) -> None:
    """Answer scrapes, on a thread of their own; not without an address. Raises OSError or ValueError."""
    if not address:
        return
    host, port = split_address(address)
    try:
        start_http_server(port, host or "0.0.0.0")
    except OSError as error:
        raise OSError(f"cannot listen on {address}: {error.strerror}") from error
    disable_created_metrics()  # type: ignore[no-untyped-call]
    loop = asyncio.get_running_loop()
    REGISTRY.register(FleetCollector(whole.fleet, whole.leads, lambda: rollouts.newest, faults, loop))


@dataclass
class Parts:
    """One control plane. `replicas` is None where there can be no other, `directory` without `--policy-dir`."""

    store: PolicyStore
    whole: WholeFleet
    rollouts: Rollouts
    replicas: Replicas | None
    directory: PolicyDirectory | None

    def jobs(self, server: ControlServer) -> list[Coroutine[Any, Any, None]]:
        """The tasks beside the server."""
        more = [self.replicas.run()] if self.replicas is not None else []
        more += [self.directory.watch()] if self.directory is not None else []
        return [
            self.store.follow(self.whole.fleet.set_policy),
            server.freezes.follow(),
            self.rollouts.follow(),
            self.rollouts.drive(),
            self.whole.watch(),
            *more,
        ]


async def assemble(args: argparse.Namespace, log: DecisionLog, ending: AsyncExitStack) -> Parts:
    """Open the store and build on it; `ending` closes what was opened. Raises MeridianError, OSError or ValueError."""
    shared = "://" in args.store
    database = await Database.open(args.store if shared else f"sqlite+aiosqlite:///{args.store}")
    ending.push_async_callback(database.close)
    store = PolicyStore(database)

    async def refresh() -> None:
        await rollouts.look()

    fleet = Fleet(clock, refresh=refresh, revision=store.get, decisions=log)
    directory = PolicyDirectory(args.policy_dir, store, fleet.set_policy, clock) if args.policy_dir else None
    fleet.set_policy(await (directory.begin() if directory else initial_policy(store, args.policy)))
    me = Replica(new_id(), advertised(args.advertise, args.listen) if shared else "")
    replicas = Replicas(database, me) if shared else None
    whole = _whole(fleet, me, replicas, ending)
    fence = replicas.fence if replicas else None
    rollouts = Rollouts(RolloutStore(store), fleet, clock, whole.known_engines, whole.leads, fence=fence)
    # Before engines connect: those of a rollout's group must not be given what is older.
    await rollouts.look()
    return Parts(store, whole, rollouts, replicas, directory)


def _whole(fleet: Fleet, me: Replica, replicas: Replicas | None, ending: AsyncExitStack) -> WholeFleet:
    if replicas is None:
        return WholeFleet(fleet, me.replica_id, None, lambda: True)
    peers = Peers(lambda: replicas.others, ClientCredentials.from_environment())
    ending.push_async_callback(peers.close)
    return WholeFleet(fleet, me.replica_id, peers, replicas.leads)


async def serve(args: argparse.Namespace, log: DecisionLog) -> None:
    """Run until a signal. Raises MeridianError, OSError or ValueError if it cannot start."""
    address, tls = listener(args)
    access = Access(args.access, everybody=everybody_may_change(args))
    async with AsyncExitStack() as ending:
        parts = await assemble(args, log, ending)
        server = ControlServer(
            parts.store,
            parts.whole,
            clock,
            access,
            CallLimits(engines=args.max_engines),
            rollouts=parts.rollouts,
            interceptors=[ServerMetrics(REGISTRY)],
        )
        serve_metrics(args.metrics_listen, parts.whole, parts.rollouts, server.faults.counts)
        if parts.replicas is not None:
            await parts.replicas.beat()
        if args.page_listen:
            page = StatusPage(parts.whole, parts.store, parts.rollouts.store, access_notice(args))
            ending.push_async_callback(page.stop)
            await page.start(*page_address(args))
        bound = await server.start(address, tls, bindable(args.health_listen) if args.health_listen else "")
        ending.push_async_callback(server.stop, STOP_GRACE_S)
        if parts.replicas is not None:
            ending.push_async_callback(leave, parts.replicas)
        logger.info("listening on %s (%s), store %s", *_where(args, address, bound))
        if notice := access_notice(args):
            logger.warning("%s", notice)
        await until_signal(parts.jobs(server))
        logger.info("draining")


def _where(args: argparse.Namespace, address: str, port: int) -> tuple[str, str, str]:
    """For the log: the address, how it is secured, the store, whose address may hold a password."""
    security = f"{'TLS' if args.tls_cert else 'no TLS'}, {args.access or 'no access file'}"
    where = address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"
    return where, security, "PostgreSQL" if "://" in args.store else args.store


async def leave(replicas: Replicas) -> None:
    """Let the other replicas know, as far as the database answers."""
    with suppress(StoreUnavailable, TimeoutError):
        async with asyncio.timeout(LEAVE_S):
            await replicas.leave()


async def until_signal(jobs: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run jobs until SIGTERM or SIGINT; one that fails ends them all."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with asyncio.TaskGroup() as running:
        tasks = [running.create_task(job) for job in jobs]
        await stop.wait()
        for task in tasks:
            task.cancel()


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    logging.basicConfig(level="WARNING", format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logger.setLevel(args.log_level.upper())
    try:
        with decision_file(args.decision_log) as settled, traces(args.otlp_endpoint, args.trace_ratio) as ended:
            asyncio.run(serve(args, DecisionLog(settled, ended)))
    except (MeridianError, OSError, ValueError) as error:
        print(f"meridian-control: {error}", file=sys.stderr)
        return 2
    return 0
