"""Serves the read-only status page of the fleet over HTTP.

The module sends the page's contents to browsers; the files in `static/` define how the page looks. The module runs on
the control plane's event loop. The module collects the contents once per interval for all viewers together, only what
one of them shows, and not at all while no viewer has the page open.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections import ChainMap
from contextlib import suppress
from importlib import resources
from types import MappingProxyType
from typing import TYPE_CHECKING

from aiohttp import web
from meridian.v1 import fleet_pb2

from meridian_control.common.errors import MeridianError, NotFound
from meridian_control.common.http_listener import HttpListener
from meridian_control.common.plain_text import printable, printable_tree
from meridian_control.fleet import decision_queries
from meridian_control.fleet.part import answer_of
from meridian_control.page.contents import Collector
from meridian_control.page.history import PERIOD_S, History
from meridian_control.page.tables import asked_for, shown
from meridian_control.page.words import life_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from meridian_control.fleet.whole_fleet import WholeFleet
    from meridian_control.page.contents import Contents
    from meridian_control.page.tables import Asked
    from meridian_control.policy.store import PolicyStore
    from meridian_control.rollout.store import RolloutStore

logger = logging.getLogger(__name__)

# Seconds between two looks at the fleet, the shortest time before a look for a viewer who has just come, and how many
# times as long as a look the pause after it lasts at least.
INTERVAL_S, SOON_S, PAUSE_SHARE = 1.0, 0.1, 3.0
# Seconds after which a viewer to whom nothing was sent is told that a look is under way, and for which one may be.
ALIVE_S, LONGEST_S = 5.0, 60.0
ALIVE = b"event: looking\ndata:\n\n"
MAX_VIEWERS = 32
# Seconds after which a viewer that reads nothing, such as a suspended computer, loses its place.
UNREAD_S = 30.0
SCRIPTS = ("page", "views", "rows", "tables", "overview", "history", "life", "rollout", "savings")
FILES = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    **{f"/{name}.js": (f"{name}.js", "text/javascript") for name in SCRIPTS},
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

    access: a warning about what unauthenticated callers may do; empty if there is nothing to warn about. hosts: names
    under which the page may be asked, beside those of its address. links: URLs that the page links to, by name.
    """

    def __init__(
        self,
        whole: WholeFleet,
        policies: PolicyStore,
        rollouts: RolloutStore,
        *,
        access: str = "",
        hosts: Iterable[str] = (),
        links: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._whole, self._collector = whole, Collector(whole, policies, rollouts)
        self._facts = {"access": access, "links": dict(links)}
        # What each viewer has asked for, and its next event.
        self._viewers: dict[asyncio.Queue[bytes | None], Asked] = {}
        self._came = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None
        # The look that is under way began at this time of the event loop's clock; None between two looks.
        self._began: float | None = None
        self._history = History()
        self._noting: asyncio.Task[None] | None = None
        app = web.Application()
        for path in FILES:
            app.router.add_get(path, self._file)
        app.router.add_get("/events", self._events, allow_head=False)
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
        await self._collector.stop()
        await self._http.stop()

    async def _file(self, request: web.Request) -> web.Response:
        name, kind = FILES[request.path]
        text = resources.files("meridian_control.page").joinpath("static", name).read_text()
        return web.Response(text=text, content_type=kind, headers=HEADERS)

    async def _request(self, request: web.Request) -> web.Response:
        """Return one request's life and the time now as JSON, or an error, with `again` if another question may find
        an answer."""
        asked = fleet_pb2.ExplainRequestRequest(
            request_id=request.query.get("id", ""), engine_id=request.query.get("engine", "")
        )
        try:
            life = life_rows(await decision_queries.explain(self._whole, asked))
            life["now"] = self._whole.fleet.clock().isoformat()
            return web.json_response(printable_tree(life), headers=HEADERS)
        except MeridianError as error:
            told = {"error": printable(str(error)), "again": error.retry_after_s is not None}
            return web.json_response(told, status=404 if isinstance(error, NotFound) else 400, headers=HEADERS)

    async def _last_hour(self, _: web.Request) -> web.Response:
        """Return the points of the last hour as JSON."""
        return web.json_response(list(self._history.points), headers=HEADERS)

    async def _note(self) -> None:
        """Add a point to the history at every period."""
        while True:
            try:
                engines, sums = await self._whole.engines_and_sums()
                fleet = self._whole.fleet
                now = fleet.clock()
                points = [await answer_of(part, part.point(), {}) for part in fleet.parts.values()]
                self._history.note(engines, sums, fleet.revision, now, dict(ChainMap(*points)))
            except Exception:
                logger.exception("cannot add to the status page's history")
            await asyncio.sleep(PERIOD_S)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Send the fleet's state now and at every interval, as server-sent events, until the viewer leaves. The query
        says what the viewer asks for, as `asked_for` reads it."""
        if len(self._viewers) >= MAX_VIEWERS:
            raise web.HTTPServiceUnavailable(text=f"{MAX_VIEWERS} pages are open already")
        # nginx would collect events until they fill a buffer.
        more = {"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"}
        response = web.StreamResponse(headers={**HEADERS, **more})
        await response.prepare(request)
        _end_if_unread(request)
        viewer: asyncio.Queue[bytes | None] = asyncio.Queue(1)
        self._viewers[viewer] = asked_for(request.query)
        self._came.set()
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        try:
            while (event := await self._next(viewer)) is not None:
                async with asyncio.timeout(UNREAD_S):
                    await response.write(event)
        except (ConnectionError, asyncio.CancelledError):
            pass
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
        finally:
            del self._viewers[viewer]
        return response

    async def _next(self, viewer: asyncio.Queue[bytes | None]) -> bytes | None:
        """Return what a viewer is sent next. A page takes a control plane that says nothing for lost, and a look at a
        large fleet, with the pause after it, may last longer than the page waits."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(ALIVE_S):
                    return await viewer.get()
            if self._began is None or asyncio.get_running_loop().time() - self._began < LONGEST_S:
                return ALIVE

    async def _look(self) -> None:
        """Send the page's contents to all viewers at every interval, as long as there are viewers."""
        while self._viewers:
            self._began = began = asyncio.get_running_loop().time()
            self._came.clear()
            asked = dict(self._viewers)
            events: dict[Asked, bytes] = {}
            try:
                tables = {table for each in asked.values() for table, _ in each.tables}
                contents = await self._collector.collect(tables, self._whole.fleet.clock())
                for each in set(asked.values()):
                    events[each] = await self._event(contents, each)
            except MeridianError as error:
                events = dict.fromkeys(asked.values(), trouble(str(error)))
            except Exception:
                logger.exception("cannot collect the status page's contents")
                text = "The page's contents cannot be collected; the control plane's log says why."
                events = dict.fromkeys(asked.values(), trouble(text))
            for viewer in asked.keys() & self._viewers.keys():
                _offer(viewer, events[asked[viewer]])
            took, self._began = asyncio.get_running_loop().time() - began, None
            await asyncio.sleep(SOON_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(max(INTERVAL_S, PAUSE_SHARE * took) - SOON_S):
                    await self._came.wait()

    async def _event(self, contents: Contents, asked: Asked) -> bytes:
        """Return the event for viewers who ask for this."""
        tables = {
            name: await shown(contents.tables[name], asked.words, field)
            for name, field in asked.tables
            if name in contents.tables
        }
        told = printable_tree(contents.facts | self._facts | {"tables": tables})
        # A page cannot read NaN, and would go on showing old contents as if they were live.
        return b"data: " + json.dumps(told, allow_nan=False).encode() + b"\n\n"


def _end_if_unread(request: web.Request) -> None:
    """Let the system end a connection whose other side takes nothing, although its buffers have room for minutes of
    small events."""
    if request.transport is not None and (option := getattr(socket, "TCP_USER_TIMEOUT", None)) is not None:
        connection = request.transport.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, option, round(UNREAD_S * 1000))


def _offer(viewer: asyncio.Queue[bytes | None], event: bytes | None) -> None:
    """Queue the next event for a viewer in place of an unread one, so a slow viewer misses events."""
    if viewer.full():
        viewer.get_nowait()
    viewer.put_nowait(event)


def trouble(text: str) -> bytes:
    return b"event: trouble\ndata: " + json.dumps(printable(text)).encode() + b"\n\n"
