"""Serves the read-only status page of the fleet over HTTP.

The module sends the page's contents to browsers; the files in `static/` define how the page looks. The module runs on
the control plane's event loop. The module collects the contents once per interval for all viewers together, and not at
all while no viewer has the page open.
"""

from __future__ import annotations

import asyncio
import json
import logging
from importlib import resources
from typing import TYPE_CHECKING

from aiohttp import web
from meridian.v1 import fleet_pb2

from meridian_control.common.errors import MeridianError, NotFound
from meridian_control.common.http_listener import HttpListener
from meridian_control.common.plain_data import plain
from meridian_control.common.plain_text import printable, printable_tree
from meridian_control.fleet import decision_queries
from meridian_control.page.contents import contents
from meridian_control.page.history import PERIOD_S, History

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meridian_control.fleet.whole_fleet import WholeFleet
    from meridian_control.policy.store import PolicyStore
    from meridian_control.rollout.store import RolloutStore

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
MAX_VIEWERS = 32
# Seconds after which a viewer that reads nothing, such as a suspended computer, loses its place.
UNREAD_S = 30.0
FILES = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/rows.js": ("rows.js", "text/javascript"),
    "/rollout.js": ("rollout.js", "text/javascript"),
    "/life.js": ("life.js", "text/javascript"),
    "/history.js": ("history.js", "text/javascript"),
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class StatusPage:
    """The HTTP application. `start` binds its address, and `stop` ends all event streams.

    hosts: names under which the page may be asked, beside those of its address.
    """

    def __init__(
        self,
        whole: WholeFleet,
        policies: PolicyStore,
        rollouts: RolloutStore,
        access: str = "",
        hosts: Iterable[str] = (),
    ) -> None:
        self._whole, self._policies, self._rollouts = whole, policies, rollouts
        # A warning about what unauthenticated callers may do; empty if there is nothing to warn about.
        self._access = access
        self._viewers: set[asyncio.Queue[bytes | None]] = set()
        self._looking: asyncio.Task[None] | None = None
        self._history = History()
        self._noting: asyncio.Task[None] | None = None
        app = web.Application()
        for path in FILES:
            app.router.add_get(path, self._file)
        app.router.add_get("/events", self._events)
        app.router.add_get("/request", self._request)
        app.router.add_get("/history", self._last_hour)
        self._http = HttpListener(app, hosts)

    async def start(self, host: str, port: int) -> int:
        """Bind the address and return the port. Raises OSError if the address cannot be bound."""
        bound = await self._http.start(host, port)
        self._noting = asyncio.create_task(self._note())
        return bound

    async def stop(self) -> None:
        for viewer in self._viewers:
            _offer(viewer, None)
        tasks = [task for task in (self._looking, self._noting) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._http.stop()

    async def _file(self, request: web.Request) -> web.Response:
        name, kind = FILES[request.path]
        text = resources.files("meridian_control.page").joinpath("static", name).read_text()
        return web.Response(text=text, content_type=kind, headers=HEADERS)

    async def _request(self, request: web.Request) -> web.Response:
        """Return one request's life as JSON."""
        asked = fleet_pb2.ExplainRequestRequest(
            request_id=request.query.get("id", ""), engine_id=request.query.get("engine", "")
        )
        try:
            return web.json_response(
                printable_tree(plain(await decision_queries.explain(self._whole, asked))), headers=HEADERS
            )
        except NotFound as error:
            return web.json_response({"error": printable(str(error))}, status=404, headers=HEADERS)
        except MeridianError as error:
            return web.json_response({"error": printable(str(error))}, status=400, headers=HEADERS)

    async def _last_hour(self, _: web.Request) -> web.Response:
        """Return the points of the last hour as JSON."""
        return web.json_response(list(self._history.points), headers=HEADERS)

    async def _note(self) -> None:
        """Add a point to the history at every period."""
        while True:
            try:
                engines, _ = await self._whole.engines()
                self._history.note(engines, self._whole.fleet.revision, self._whole.fleet.clock())
            except Exception:
                logger.exception("cannot add to the status page's history")
            await asyncio.sleep(PERIOD_S)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Send the fleet's state now and at every interval, as server-sent events, until the viewer leaves."""
        if len(self._viewers) >= MAX_VIEWERS:
            raise web.HTTPServiceUnavailable(text=f"{MAX_VIEWERS} pages are open already")
        response = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
        await response.prepare(request)
        viewer: asyncio.Queue[bytes | None] = asyncio.Queue(1)
        self._viewers.add(viewer)
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        try:
            while (event := await viewer.get()) is not None:
                async with asyncio.timeout(UNREAD_S):
                    await response.write(event)
        except (ConnectionError, asyncio.CancelledError):
            pass
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
        finally:
            self._viewers.discard(viewer)
        return response

    async def _look(self) -> None:
        """Send the page's contents to all viewers at every interval, as long as there are viewers."""
        while self._viewers:
            try:
                now = self._whole.fleet.clock()
                page_contents = await contents(self._whole, self._policies, self._rollouts, now) | {
                    "access": self._access
                }
                # A page cannot read NaN, and would go on showing old contents as if they were live.
                event = b"data: " + json.dumps(printable_tree(page_contents), allow_nan=False).encode() + b"\n\n"
            except MeridianError as error:
                event = trouble(str(error))
            except Exception:
                logger.exception("cannot collect the status page's contents")
                event = trouble("The page's contents cannot be collected; the control plane's log says why.")
            for viewer in self._viewers:
                _offer(viewer, event)
            await asyncio.sleep(INTERVAL_S)


def _offer(viewer: asyncio.Queue[bytes | None], event: bytes | None) -> None:
    """Queue the next event for a viewer in place of an unread one, so a slow viewer misses events."""
    if viewer.full():
        viewer.get_nowait()
    viewer.put_nowait(event)


def trouble(text: str) -> bytes:
    return b"event: trouble\ndata: " + json.dumps(printable(text)).encode() + b"\n\n"
