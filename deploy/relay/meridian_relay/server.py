"""Serves clients: eligible chat requests through an exchange, all other requests byte for byte from one engine."""

from __future__ import annotations

import asyncio
import logging
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING

import aiohttp
from aiohttp import web
from yarl import URL

from meridian_relay.bodies import CHAT, carried
from meridian_relay.engines import UNREACHABLE, Engines, Refused
from meridian_relay.exchange import Exchange
from meridian_relay.headers import MAX_LINE, OF_THE_BODY, OWN, READABLE, REQUEST_ID, is_json, no_utf8, passed
from meridian_relay.listener import HttpListener
from meridian_relay.metrics import RelayMetrics
from meridian_relay.replies import ClientGone, StreamedReply, WholeReply, no_engine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prometheus_client import CollectorRegistry

    from meridian_relay.bodies import CarriedRequest

logger = logging.getLogger(__name__)

# Largest body of a chat request in bytes; images may be part of it.
MAX_BODY = 1 << 30


class Relay:
    """The HTTP application. `start` binds its address; `stop` ends the requests under way.

    hosts: names under which the relay may be asked, beside those of its address.
    """

    def __init__(
        self,
        thinking: Sequence[str],
        think_end: str,
        registry: CollectorRegistry,
        drain_s: float,
        hosts: Sequence[str] = (),
    ) -> None:
        self._thinking, self._think_end = thinking, think_end
        self._metrics = RelayMetrics(registry)
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_route("*", "/{path:.*}", self._any)
        self._http = HttpListener(
            app,
            hosts,
            drain_s,
            handler_cancellation=True,
            auto_decompress=False,
            max_line_size=MAX_LINE,
            max_field_size=MAX_LINE,
        )

    async def start(self, host: str, port: int) -> int:
        """Bind the address and return the port. Raises OSError if the address cannot be bound."""
        self._engines = Engines(self._thinking)
        return await self._http.start(host, port)

    async def stop(self) -> None:
        """Accept no more requests, and let those under way finish for the drain time."""
        await self._http.stop()
        await self._engines.close()

    def cut(self) -> None:
        """End the requests under way."""
        self._http.cut()

    async def _any(self, request: web.Request) -> web.StreamResponse:
        if name := no_utf8(request.headers):
            raise web.HTTPBadRequest(text=f"the header {name} is not UTF-8\n", headers=READABLE)
        with self._metrics.in_flight.track_inprogress():
            if request.method != "POST" or target_of(request).partition("?")[0] != CHAT:
                return await self._proxy(request, request.content if request.can_read_body else None)
            body = await request.read()
            eligible = carried(body, self._think_end) if is_json(request.headers) else None
            return await (self._proxy(request, body) if eligible is None else self._exchange(request, eligible))

    async def _exchange(self, request: web.Request, eligible: CarriedRequest) -> web.StreamResponse:
        """Serve an eligible request, and count its result."""
        request_id = request.headers.get(REQUEST_ID) or uuid.uuid4().hex
        reply = (
            StreamedReply(request, request_id, eligible.usage_wanted) if eligible.streamed else WholeReply(request_id)
        )
        headers = passed(request.headers, OF_THE_BODY)
        # The client session adds no headers by itself, since proxied requests pass as they are.
        headers[REQUEST_ID], headers["Content-Type"] = request_id, "application/json"
        exchange = Exchange(eligible, reply, self._engines, self._metrics, headers=headers, marker=self._think_end)
        result = "failed"
        try:
            response = await exchange.serve()
            result = exchange.result
        except Refused as refused:
            result = exchange.result
            answered = passed(refused.headers, {"content-length"})
            answered[REQUEST_ID] = request_id
            response = web.Response(status=refused.status, body=refused.body, headers=answered)
        except ClientGone as gone:
            result, response = "client_gone", gone.response
        except asyncio.CancelledError:
            result = "failed" if self._http.is_cut else "client_gone"
            raise
        finally:
            self._metrics.requests.labels(result).inc()
        return response

    async def _proxy(self, request: web.Request, body: bytes | aiohttp.StreamReader | None) -> web.StreamResponse:
        """Pass a request on to the first engine that can be reached, and its response back."""
        headers, failure = passed(request.headers, OWN), ""
        for url in self._engines.by_load():
            response: web.StreamResponse | None = None
            try:
                target = URL(url + target_of(request), encoded=True)
                async with self._engines.response(url, request.method, target, headers=headers, data=body) as upstream:
                    answered = passed(upstream.headers, set())
                    if location := answered.get("Location"):
                        answered["Location"] = here(location, target)
                    response = web.StreamResponse(status=upstream.status, reason=upstream.reason, headers=answered)
                    await response.prepare(request)
                    async for part in upstream.content.iter_any():
                        await response.write(part)
                    return response
            except UNREACHABLE as error:
                failure = f"{url} cannot be reached: {error}"
            except (aiohttp.ClientError, OSError) as error:
                # The text of some errors has the query, in which a client may have put a key.
                reason = error.message if isinstance(error, aiohttp.ClientResponseError) else error
                failure = f"{url} failed: {reason}"
                if response is not None:
                    # A client that has hung up raises ConnectionError.
                    if not isinstance(error, ConnectionError):
                        logger.warning("%s %s: %s broke off its response", request.method, request.path, url)
                    # The client learns from the broken connection that the response is not whole.
                    if request.transport is not None:
                        request.transport.abort()
                    return response
                break
        logger.warning("%s %s: %s", request.method, request.path, failure)
        return no_engine()


def target_of(request: web.Request) -> str:
    """Return the path and query that a client asks for; clients of a proxy name the whole URL."""
    raw = request.raw_path
    return raw if raw.startswith("/") else request.rel_url.raw_path_qs


def here(location: str, asked: URL) -> str:
    """Return where a redirect leads a client of the relay: an engine names its own address, which the client may not
    reach. asked: the URL that the relay has asked for."""
    with suppress(ValueError):
        if (to := URL(location, encoded=True)).authority == asked.authority:
            # Two slashes would begin the name of a host.
            return "/" + to.raw_path_qs.lstrip("/") + (f"#{to.raw_fragment}" if to.raw_fragment else "")
    return location
