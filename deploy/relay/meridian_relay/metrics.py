"""Defines the metrics of the relay, and serves them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web
from prometheus_client import Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.aiohttp import make_aiohttp_handler

from meridian_relay.listener import HttpListener

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client import CollectorRegistry

RESULTS = ("one_engine", "handed_over", "recomputed", "finished_on_thinking_engine", "failed", "client_gone")
GAP_S = (0.01, 0.02, 0.03, 0.05, 0.08, 0.13, 0.2, 0.35, 0.6, 1.0, 2.0, 5.0, 10.0)


class RelayMetrics:
    """The metrics in a registry. Every eligible request adds one to exactly one result."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter("meridian_relay_requests", "Eligible requests by result", ["result"], registry=registry)
        self._resumed = Counter(
            "meridian_relay_resumed", "Broken streams by the stage of the request", ["stage"], registry=registry
        )
        self.gap = Histogram(
            "meridian_relay_gap_seconds",
            "Seconds from the handover to the first chunk of the engine that continues",
            buckets=GAP_S,
            registry=registry,
        )
        self.in_flight = Gauge("meridian_relay_in_flight", "Requests under way", registry=registry)
        for result in RESULTS:
            self.requests.labels(result)
        for stage in ("thinking", "answer"):
            self._resumed.labels(stage)

    def resumed(self, thinking: bool) -> None:
        self._resumed.labels("thinking" if thinking else "answer").inc()


def metrics_listener(registry: CollectorRegistry, hosts: Iterable[str]) -> HttpListener:
    """Return the listener of /metrics. hosts: names under which it may be asked, beside those of its address."""
    disable_created_metrics()  # type: ignore[no-untyped-call]
    app = web.Application()
    app.router.add_get("/{path:.*}", make_aiohttp_handler(registry, disable_compression=True))
    return HttpListener(app, hosts)
