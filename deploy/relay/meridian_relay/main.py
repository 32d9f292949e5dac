"""Runs `meridian-relay`: reads the flags, and serves until a signal."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import re
import resource
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from prometheus_client import REGISTRY
from yarl import URL

from meridian_relay import __version__, log
from meridian_relay.listener import flag_address, host_name
from meridian_relay.log import printable
from meridian_relay.metrics import metrics_listener
from meridian_relay.server import Relay

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

logger = logging.getLogger("meridian_relay")

_BASE = re.compile(r"https?://[^\s/?#@]+/?", re.IGNORECASE)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="meridian-relay", description="An OpenAI-compatible relay in front of engines that think and that answer."
    )
    p.add_argument("--listen", default="127.0.0.1:8000", help="address for clients: host:port, or :port for all hosts")
    p.add_argument(
        "--thinking",
        action="append",
        required=True,
        metavar="URL",
        help="base URL of a thinking engine's OpenAI server, http://host:port; repeat the flag for each engine",
    )
    p.add_argument("--metrics-listen", default="127.0.0.1:9466", help="address of /metrics; empty switches it off")
    p.add_argument(
        "--allow-host",
        action="append",
        type=host_name,
        default=[],
        metavar="NAME",
        help="further host name under which the relay and /metrics may be asked; repeatable",
    )
    p.add_argument(
        "--think-end",
        default="</think>",
        help="text with which the model ends its thinking; of gpt-oss this is all from <|end|> to <|message|>",
    )
    p.add_argument("--drain-s", type=float, default=30.0, help="seconds for requests under way after SIGTERM")
    log.add_flags(p, log_format())
    p.add_argument("--version", action="version", version=__version__)
    return p


def log_format() -> str:
    """Return the form of the log that the environment names. Raises ValueError."""
    form = os.environ.get(log.VARIABLE, "").strip() or "text"
    if form not in log.FORMATS:
        raise ValueError(f"{log.VARIABLE} must be text or json; got {form!r}")
    return form


def engine_url(value: str) -> str:
    """Return the base URL of an engine without a final slash. Raises ValueError."""
    try:
        usable = _BASE.fullmatch(value) and URL(value).host and URL(value).port
    except ValueError:
        usable = False
    if not usable:
        raise ValueError(f"--thinking must be http://host:port or https://host:port; got {value!r}")
    return value.rstrip("/")


def relay_of(args: argparse.Namespace) -> Relay:
    """Return the relay that the flags describe. Raises ValueError."""
    if not args.think_end:
        raise ValueError("--think-end must not be empty; got ''")
    if not 0 <= args.drain_s < float("inf"):
        raise ValueError(f"--drain-s must be a number of seconds, at least 0; got {args.drain_s}")
    return Relay(
        list(dict.fromkeys(map(engine_url, args.thinking))), args.think_end, REGISTRY, args.drain_s, args.allow_host
    )


def allow_files() -> None:
    """Raise the limit of open files as far as the system lets a user: each request takes two, one for its client."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def on_signals(act: Callable[[], None]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, act)


async def serve(args: argparse.Namespace) -> None:
    """Run a relay until a signal; a second one ends the requests that are still under way. Raises OSError or ValueError
    if the start fails."""
    stop = asyncio.Event()
    on_signals(stop.set)
    host, port = flag_address("--listen", args.listen)
    relay = relay_of(args)
    metrics = metrics_listener(REGISTRY, args.allow_host)
    if args.metrics_listen:
        await metrics.start(*flag_address("--metrics-listen", args.metrics_listen))
    try:
        port = await relay.start(host, port)
        logger.info("listening on %s:%d, thinking engines %s", host, port, " ".join(args.thinking))
        await stop.wait()
        on_signals(relay.cut)
        logger.info("shutting down: requests under way have %g s; a second signal ends them", args.drain_s)
    finally:
        await relay.stop()
        await metrics.stop()


def main(argv: Sequence[str] | None = None) -> int:
    try:
        args = parser().parse_args(argv)
        log.begin(args)
        allow_files()
        asyncio.run(serve(args))
    except (OSError, ValueError) as error:
        print(f"meridian-relay: {printable(str(error))}", file=sys.stderr)
        return 2
    return 0
