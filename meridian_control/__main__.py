"""`meridian-control`: the composition root. Reads flags and the policy file, wires store, fleet and server, and runs
them on one event loop until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import logging
import os
import signal
import sys
from contextlib import AsyncExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY, disable_created_metrics, start_http_server

from meridian_control import __version__, policy
from meridian_control.access import Access
from meridian_control.credentials import Credentials
from meridian_control.database import Database
from meridian_control.decision_file import decision_file
from meridian_control.decision_log import DecisionLog
from meridian_control.errors import EtagMismatch, MeridianError, StoreUnavailable
from meridian_control.fleet import Fleet
from meridian_control.grpc_metrics import ServerMetrics
from meridian_control.limits import Limits
from meridian_control.metrics import FleetCollector
from meridian_control.peers import Peers
from meridian_control.policy_dir import PolicyDirectory
from meridian_control.replicas import Replica, Replicas, new_id, own_host
from meridian_control.rollout_driver import Rollouts
from meridian_control.rollout_store import RolloutStore
from meridian_control.server import ControlServer
from meridian_control.status_page import StatusPage
from meridian_control.store import EMPTY_ETAG, PolicyStore, StoredRevision
from meridian_control.tls import server_credentials
from meridian_control.whole_fleet import WholeFleet

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence

    import grpc

    from meridian_control.decision_log import Life

logger = logging.getLogger("meridian_control")

STOP_GRACE_S = 5.0
# How long a database that does not answer may keep a replica from ending.
LEAVE_S = 2.0


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="meridian-control", description="The control plane for reasoning models on vLLM.")
    p.add_argument(
        "--listen", default="127.0.0.1:50051", help="address of the gRPC server: host:port, :port for all, unix:PATH"
    )
    p.add_argument("--tls-cert", type=Path, help="PEM certificate chain of the server; read again when it changes")
    p.add_argument("--tls-key", type=Path, help="its PEM key")
    p.add_argument(
        "--client-ca",
        type=Path,
        help="PEM certificates of the CA that every client's must be signed by, one with a token included",
    )
    p.add_argument("--access", type=Path, help="file that says who may do what; read again when it changes")
    p.add_argument("--insecure", action="store_true", help="allow what strangers on the network could use")
    p.add_argument("--max-engines", type=int, default=Limits.engines, help="engines connected at once, at most")
    p.add_argument("--metrics-listen", default="127.0.0.1:9464", help="address of /metrics; empty switches it off")
    p.add_argument("--page-listen", default="127.0.0.1:9465", help="address of the status page; empty switches it off")
    p.add_argument("--health-listen", default="", help="address that serves health alone, without TLS, for probes")
    files = p.add_mutually_exclusive_group()
    files.add_argument(
        "--policy", type=Path, help="file an empty store begins with; default: ./meridian.toml, then the user's"
    )
    files.add_argument("--policy-dir", type=Path, help="directory whose meridian.toml is put in force when it changes")
    p.add_argument(
        "--store",
        default=os.environ.get("MERIDIAN_STORE", "meridian.db"),
        help="where revisions are kept: a SQLite file, or postgresql://… for several replicas",
    )
    p.add_argument(
        "--advertise",
        help="host:port where other replicas reach this one; default: as --listen, with the host's own address",
    )
    p.add_argument(
        "--decision-log", type=Path, help="file for decisions and their outcomes, JSON lines, rotated; default: none"
    )
    p.add_argument(
        "--otlp-endpoint",
        default=os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"),
        help="where requests are sent as OpenTelemetry traces, over gRPC; default: nowhere",
    )
    p.add_argument(
        "--trace-ratio", type=float, default=0.01, help="share of the requests traced that bring no trace of their own"
    )
    p.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    p.add_argument("--version", action="version", version=__version__)
    return p


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port` or `:port`. Raises ValueError."""
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"an address must be host:port or :port; got {address!r}")
    return host.strip("[]"), int(port)


def bindable(address: str) -> str:
    """The address as gRPC writes it. Raises ValueError."""
    host, port = split_address(address)
    return f"{host or '[::]'}:{port}"


async def initial_policy(store: PolicyStore, path: Path | None) -> StoredRevision:
    """What the store holds; an empty store begins with the policy file, or the defaults where there is none."""
    found = policy.find(path)
    wanted = policy.load(found) if found is not None else policy.Policy()
    source = str(found) if found is not None else "defaults"
    current = await store.current()
    while current is None:
        # Of several replicas that start at once, one is first.
        with suppress(EtagMismatch):
            await store.append(wanted, etag=EMPTY_ETAG, author="meridian-control", reason=source, now=datetime.now(UTC))
        current = await store.current()
    if found is not None and current.policy != wanted:
        logger.warning("revision %d of the store is in force, not %s: use meridianctl", current.revision, found)
    return current


def advertised(said: str | None, listen: str) -> str:
    """Where other replicas reach this one. Raises ValueError."""
    host, port = split_address(said or listen)
    if not said and host in ("", "::", "0.0.0.0"):
        host = own_host()
    if not host or not port:
        raise ValueError(f"--advertise must be host:port; got {said or listen!r}")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listener(args: argparse.Namespace) -> tuple[str, grpc.ServerCredentials | None]:
    """The address as gRPC writes it, and its TLS. Raises OSError or ValueError."""
    if bool(args.tls_cert) != bool(args.tls_key) or (args.client_ca and not args.tls_cert):
        raise ValueError("--tls-cert and --tls-key belong together, and --client-ca needs both")
    tls = server_credentials(args.tls_cert, args.tls_key, args.client_ca) if args.tls_cert else None
    if args.listen.startswith("unix:"):
        return args.listen, tls
    host, port = split_address(args.listen)
    known = args.client_ca or args.access
    if not (args.insecure or _loopback(host) or (tls and known)):
        missing = "asks nobody who they are: give --client-ca or --access"
        raise ValueError(
            f"--listen {args.listen} can be reached from other machines and "
            f"{missing if tls else 'has no TLS: give --tls-cert and --tls-key'}, "
            f"or --insecure where the network is trusted; --listen 127.0.0.1:{port} is for this machine only"
        )
    return bindable(args.listen), tls


def _loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@contextmanager
def traces(endpoint: str | None, ratio: float) -> Iterator[Callable[[Life], None] | None]:
    """Where lives go that are over; None without an endpoint. Raises ValueError."""
    if not endpoint:
        yield None
        return
    if not 0 <= ratio <= 1:
        raise ValueError(f"--trace-ratio must be from 0 to 1; got {ratio}")
    try:
        from meridian_control.tracing import Tracing
    except ImportError as error:
        raise ValueError(f"--otlp-endpoint needs the extra meridian-llm[traces]: {error}") from error
    tracing = Tracing(endpoint, ratio)
    try:
        yield tracing.over
    finally:
        tracing.stop()


def page_address(args: argparse.Namespace) -> tuple[str, int]:
    """Host and port of the status page. Raises ValueError."""
    host, port = split_address(args.page_listen)
    if not (args.insecure or _loopback(host)):
        raise ValueError(
            f"--page-listen {args.page_listen} would show the fleet to whoever reaches it: put a proxy that asks who "
            f"they are in front of 127.0.0.1:{port}, or give --insecure where the network is trusted"
        )
    return host, port


def serve_metrics(address: str, whole: WholeFleet, rollouts: Rollouts) -> None:
    """Answer scrapes, on a thread of their own; not without an address. Raises OSError or ValueError."""
    if not address:
        return
    host, port = split_address(address)
    try:
        start_http_server(port, host or "0.0.0.0")
    except OSError as error:
        raise OSError(f"cannot listen on {address}: {error.strerror}") from error
    disable_created_metrics()  # type: ignore[no-untyped-call]
    REGISTRY.register(FleetCollector(whole.fleet, whole.leads, lambda: rollouts.newest, asyncio.get_running_loop()))


async def serve(args: argparse.Namespace, log: DecisionLog) -> None:
    """Run until a signal. Raises MeridianError, OSError or ValueError if it cannot start."""

    def clock() -> datetime:
        return datetime.now(UTC)

    address, tls = listener(args)
    access = Access(args.access)
    shared = "://" in args.store
    database = await Database.open(args.store if shared else f"sqlite+aiosqlite:///{args.store}")
    store, ending = PolicyStore(database), AsyncExitStack()
    try:

        async def refresh() -> None:
            await rollouts.look()

        fleet = Fleet(clock, refresh=refresh, revision=store.get, decisions=log)
        directory = PolicyDirectory(args.policy_dir, store, fleet.set_policy, clock) if args.policy_dir else None
        fleet.set_policy(await (directory.begin() if directory else initial_policy(store, args.policy)))
        me = new_id()
        replicas = Replicas(database, Replica(me, advertised(args.advertise, args.listen))) if shared else None
        peers = Peers(lambda: replicas.others, Credentials.from_environment()) if replicas else None
        whole = WholeFleet(fleet, me, peers, replicas.leads if replicas else lambda: True)
        kept_rollouts = RolloutStore(store)
        rollouts = Rollouts(
            kept_rollouts,
            fleet,
            clock,
            whole.known_engines,
            whole.leads,
            fence=replicas.fence if replicas else None,
        )
        serve_metrics(args.metrics_listen, whole, rollouts)
        # Before engines connect: those of a rollout's group must not be given what is older.
        await rollouts.look()
        server = ControlServer(
            store,
            whole,
            clock,
            access,
            Limits(engines=args.max_engines),
            rollouts=rollouts,
            interceptors=[ServerMetrics(REGISTRY)],
        )
        if replicas is not None:
            await replicas.beat()
        if args.page_listen:
            page = StatusPage(whole, store, kept_rollouts)
            ending.push_async_callback(page.stop)
            await page.start(*page_address(args))
        bound = await server.start(address, tls, bindable(args.health_listen) if args.health_listen else "")
        security = f"{'TLS' if tls else 'no TLS'}, {args.access or 'no access file'}"
        # An address may hold a password.
        where = f"{address.rpartition(':')[0]}:{bound}" if not address.startswith("unix:") else address
        logger.info("listening on %s (%s), store %s", where, security, "PostgreSQL" if shared else args.store)
        jobs = [
            store.follow(fleet.set_policy),
            server.freezes.follow(),
            rollouts.follow(),
            rollouts.drive(),
            whole.watch(),
        ]
        if replicas is not None:
            jobs.append(replicas.run())
        if directory is not None:
            jobs.append(directory.watch())
        await until_signal(jobs)
        logger.info("draining")
        if replicas is not None:
            with suppress(StoreUnavailable, TimeoutError):
                async with asyncio.timeout(LEAVE_S):
                    await replicas.leave()
        await server.stop(STOP_GRACE_S)
        if peers is not None:
            await peers.close()
    finally:
        await ending.aclose()
        await database.close()


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


if __name__ == "__main__":
    sys.exit(main())
