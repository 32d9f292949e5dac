"""Runs `meridian-control`: reads the flags, assembles the parts, and runs them on one event loop until a signal."""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import sys
from contextlib import AsyncExitStack, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY

from meridian_control import __version__
from meridian_control.app import garbage
from meridian_control.app.assembly import Parts, assemble
from meridian_control.app.background import Job, keep_running
from meridian_control.app.flags import access_notice, bindable, listener, page_address, page_links, parser
from meridian_control.common import logs
from meridian_control.common.environment import BadVariable
from meridian_control.common.errors import MeridianError, StoreUnavailable
from meridian_control.common.metrics_listener import MetricsListener
from meridian_control.common.plain_text import printable
from meridian_control.journal.jsonl_file import decision_file
from meridian_control.journal.log import DecisionLog
from meridian_control.page.server import StatusPage
from meridian_control.server.handshakes import Handshakes
from meridian_control.telemetry.fleet_metrics import FleetCollector
from meridian_control.telemetry.grpc_metrics import ServerMetrics

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence

    from meridian_control.fleet.membership import Replicas
    from meridian_control.journal.records import Life

logger = logging.getLogger("meridian_control")

STOP_GRACE_S = 5.0
# Seconds for which a replica waits, at its end, for a database that does not answer.
LEAVE_S = 2.0


@contextmanager
def traces(endpoint: str | None, ratio: float) -> Iterator[Callable[[Life], None] | None]:
    """Yield the function that exports a finished request as a trace; None without an endpoint. Raises ValueError."""
    if not endpoint:
        yield None
        return
    try:
        from meridian_control.telemetry.request_traces import Tracing
    except ImportError as error:
        raise ValueError(f"--otlp-endpoint needs the extra meridian-llm[traces]: {error}") from error
    tracing = Tracing(endpoint, ratio)
    try:
        yield tracing.queue_spans
    finally:
        tracing.stop()


def register(parts: Parts) -> None:
    """Let /metrics show the fleet."""
    loop = asyncio.get_running_loop()
    whole, rollouts, faults = parts.whole, parts.rollouts, parts.gate.faults.counts
    REGISTRY.register(FleetCollector(whole.fleet, whole.leads, lambda: rollouts.newest, faults, loop))


async def serve(args: argparse.Namespace, log: DecisionLog) -> None:
    """Run a control plane until a signal. Raises MeridianError, OSError or ValueError if the start fails."""
    handshakes = Handshakes()
    address, tls = listener(args, handshakes.begun)
    links = page_links(args)
    async with AsyncExitStack() as ending:
        parts = await assemble(args, log, ending, [ServerMetrics(REGISTRY)])
        register(parts)
        if args.metrics_listen:
            metrics = MetricsListener(REGISTRY, args.allow_host)
            ending.push_async_callback(metrics.stop)
            await metrics.start(args.metrics_listen)
        if parts.replicas is not None:
            # The start may still fail, and must not leave a replica behind that seems to live and to lead.
            ending.push_async_callback(leave, parts.replicas)
            await parts.replicas.beat()
        if args.page_listen:
            shown = {"access": access_notice(args), "hosts": args.allow_host, "links": links}
            page = StatusPage(parts.whole, parts.store, parts.rollouts.store, **shown)
            ending.push_async_callback(page.stop)
            await page.start(*page_address(args))
        for part in parts.whole.fleet.parts.values():
            ending.push_async_callback(part.end)
        parts.gate.handshakes = handshakes
        bound = await parts.server.start(address, tls, bindable(args.health_listen) if args.health_listen else "")
        ending.push_async_callback(parts.server.stop, STOP_GRACE_S)
        if tls is not None and not address.startswith("unix:"):
            handshakes.watch(bound)
        if parts.replicas is not None:
            # The others take over before the streams end.
            ending.push_async_callback(leave, parts.replicas)
        logger.info("meridian-control %s listening on %s", __version__, _where(args, address, bound))
        if notice := access_notice(args):
            logger.warning("%s", notice)
        jobs = [*parts.jobs(), Job("garbage", partial(garbage.collect, trims=parts.whole.fleet.memory.trims))]
        await until_signal([keep_running(job) for job in jobs])
        logger.info("shutting down: draining the streams")


def _where(args: argparse.Namespace, address: str, port: int) -> str:
    """Return addresses, security and store for the log; the store's address is left out, as it may hold a password."""
    security = f"{'TLS' if args.tls_cert else 'no TLS'}, {args.access or 'no access file'}"
    where = address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"
    others = {"/metrics": args.metrics_listen, "status page": args.page_listen, "health": args.health_listen}
    served = "".join(f", {name} on {listen}" for name, listen in others.items() if listen)
    store = "PostgreSQL" if "://" in args.store else f"SQLite {args.store}"
    return f"{where} for gRPC ({security}){served}; store {store}"


async def leave(replicas: Replicas) -> None:
    """Tell the other replicas through the database that this replica ends, unless the database does not answer."""
    with suppress(StoreUnavailable, TimeoutError):
        async with asyncio.timeout(LEAVE_S):
            await replicas.leave()


async def until_signal(jobs: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run the jobs until SIGTERM or SIGINT; an error of one ends all jobs."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with asyncio.TaskGroup() as running:
        tasks = [running.create_task(job) for job in jobs]
        await stop.wait()
        for task in tasks:
            task.cancel()


def allow_files() -> None:
    """Raise the limit of open files as far as the system lets a user: each engine and each caller takes one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def main(argv: Sequence[str] | None = None) -> int:
    try:
        args = parser().parse_args(argv)
    except BadVariable as error:
        print(f"meridian-control: {printable(str(error))}", file=sys.stderr)
        return 2
    logs.begin(args)
    allow_files()
    try:
        with (
            decision_file(args.decision_log, serves=args.listen) as settled,
            traces(args.otlp_endpoint, args.trace_ratio) as ended,
        ):
            asyncio.run(serve(args, DecisionLog(settled, ended)))
    except (MeridianError, OSError, ValueError) as error:
        # The cause is nearly always a flag or a file; the traceback shows whether it is an error of this program.
        logger.debug("the control plane has ended with an error", exc_info=error)
        print(f"meridian-control: {printable(str(error))}", file=sys.stderr)
        return 2
    return 0
