"""Serves /metrics for the programs of the control plane.

The listener runs on the event loop, so that a client that asks nothing costs no thread; the metrics are collected on
one thread, because collectors wait for the event loop.
"""

from __future__ import annotations

import asyncio
import gzip
import re
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from aiohttp import web
from prometheus_client import disable_created_metrics
from prometheus_client.exposition import choose_encoder

from meridian_control.common.addresses import flag_address
from meridian_control.common.http_listener import HttpListener

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client import CollectorRegistry

# The weight of a coding that a client refuses.
NEVER = re.compile(r"q=0(\.0*)?")


class MetricsListener:
    """Serves a registry. hosts: names under which it may be asked, beside those of its address."""

    def __init__(self, registry: CollectorRegistry, hosts: Iterable[str] = ()) -> None:
        self._registry = registry
        self._thread = ThreadPoolExecutor(1, "metrics")
        app = web.Application()
        app.router.add_get("/{path:.*}", self._metrics)
        self._http = HttpListener(app, hosts)

    async def start(self, address: str) -> int:
        """Listen on host:port or :port, and return the port. Raises OSError or ValueError, which name the flag
        --metrics-listen."""
        disable_created_metrics()  # type: ignore[no-untyped-call]
        host, port = flag_address("--metrics-listen", address)
        try:
            return await self._http.start(host, port)
        except OSError as error:
            raise OSError(f"--metrics-listen: {error}") from error

    async def stop(self) -> None:
        await self._http.stop()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _metrics(self, request: web.Request) -> web.Response:
        accepted, names = request.headers.get("Accept", ""), request.query.getall("name[]", [])
        zipped = _accepts_gzip(request.headers.get("Accept-Encoding", ""))
        loop = asyncio.get_running_loop()
        body, kind = await loop.run_in_executor(self._thread, self._written, accepted, names, zipped)
        headers = {"Content-Type": kind, "X-Content-Type-Options": "nosniff"}
        return web.Response(body=body, headers=headers | ({"Content-Encoding": "gzip"} if zipped else {}))

    def _written(self, accepted: str, names: list[str], zipped: bool) -> tuple[bytes, str]:
        """Return the metrics in a format that the client accepts, and the name of that format."""
        encoder, kind = choose_encoder(accepted)
        registry = self._registry.restricted_registry(names) if names else self._registry
        text = encoder(registry)
        return gzip.compress(text, 6) if zipped else text, kind


def _accepts_gzip(accepted: str) -> bool:
    """Return whether an Accept-Encoding header accepts gzip; a weight of 0 refuses it."""
    codings = (part.replace(" ", "").partition(";") for part in accepted.lower().split(","))
    return any(coding == "gzip" and not NEVER.fullmatch(weight) for coding, _, weight in codings)
