"""A read-only page about the fleet, over HTTP: what FleetService, PolicyService and RolloutService say, for eyes.

Owns what the page is told and how often; what it looks like is in `page/`. Runs on the control plane's event loop: the
fleet is looked at once per interval, however many look at the page, and not at all while nobody does.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections import Counter
from importlib import resources
from typing import TYPE_CHECKING, Any

from aiohttp import web
from google.protobuf.json_format import MessageToDict
from meridian.v1 import agent_pb2, fleet_pb2

from meridian_control import __version__, why
from meridian_control.errors import MeridianError, NotFound

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from meridian_control.rollout_store import RolloutStore
    from meridian_control.store import PolicyStore, RevisionHeader
    from meridian_control.whole_fleet import WholeFleet

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
# Rows of each table; the numbers above them are of everything.
MAX_ENGINES, MAX_REQUESTS, MAX_DECISIONS, MAX_REVISIONS, MAX_ROLLOUTS = 200, 100, 50, 10, 5
MAX_VIEWERS = 32
ASKED_DECISIONS = 200
CARRIED_OUT = (agent_pb2.OUTCOME_APPLIED, agent_pb2.OUTCOME_SHADOWED)
FILES = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class StatusPage:
    """The HTTP application. `start` binds, `stop` ends all streams."""

    def __init__(self, whole: WholeFleet, policies: PolicyStore, rollouts: RolloutStore) -> None:
        self._whole, self._policies, self._rollouts = whole, policies, rollouts
        self._viewers: set[asyncio.Queue[bytes | None]] = set()
        self._looking: asyncio.Task[None] | None = None
        app = web.Application()
        for path in FILES:
            app.router.add_get(path, self._file)
        app.router.add_get("/events", self._events)
        app.router.add_get("/request", self._request)
        self._runner = web.AppRunner(app, access_log=None)

    async def start(self, host: str, port: int) -> int:
        """Returns the port. Raises OSError when the address cannot be had."""
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host or None, port).start()
        except OSError as error:
            raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from error
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        for viewer in self._viewers:
            _offer(viewer, None)
        if self._looking is not None:
            self._looking.cancel()
        await self._runner.cleanup()

    async def _file(self, request: web.Request) -> web.Response:
        name, kind = FILES[request.path]
        text = resources.files("meridian_control").joinpath("page", name).read_text()
        return web.Response(text=text, content_type=kind, headers=HEADERS)

    async def _request(self, request: web.Request) -> web.Response:
        """One request's life."""
        asked = fleet_pb2.ExplainRequestRequest(
            request_id=request.query.get("id", ""), engine_id=request.query.get("engine", "")
        )
        try:
            return web.json_response(plain(await why.explain(self._whole, asked)), headers=HEADERS)
        except NotFound as error:
            return web.json_response({"error": str(error)}, status=404, headers=HEADERS)
        except MeridianError as error:
            return web.json_response({"error": str(error)}, status=400, headers=HEADERS)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """The fleet's state now and at every interval, as server-sent events, until the viewer leaves."""
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
                await response.write(event)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._viewers.discard(viewer)
        return response

    async def _look(self) -> None:
        while self._viewers:
            try:
                event = b"data: " + json.dumps(await self.contents()).encode() + b"\n\n"
            except MeridianError as error:
                event = trouble(str(error))
            except Exception:
                logger.exception("the status page's contents could not be had")
                event = trouble("the page's contents could not be had; the control plane's log says why")
            for viewer in self._viewers:
                _offer(viewer, event)
            await asyncio.sleep(INTERVAL_S)

    async def contents(self) -> dict[str, Any]:
        """What the page shows. Raises MeridianError."""
        state = await self._whole.state()
        ends = await self._ends()
        up = [e for e in state.engines if e.state == fleet_pb2.CONNECTION_STATE_CONNECTED]
        troubled = sorted(state.engines, key=lambda e: (not is_troubled(e), e.engine_id))
        ended: Counter[str] = Counter()
        for engine in state.engines:
            ended.update({reason: count for reason, count in engine.ends.items() if not reason.endswith("_shadowed")})
        return {
            "version": __version__,
            "replica": self._whole.replica_id,
            "unreachable": list(state.unreachable_replicas),
            "totals": {
                "engines": len(up),
                "gone": len(state.engines) - len(up),
                "troubled": sum(map(is_troubled, state.engines)),
                "thinking": sum(e.thinking for e in up),
                "answering": sum(e.answering for e in up),
                "waiting": sum(e.waiting for e in up),
                "ended": ended,
                "output_critical": sum(e.counters.output_critical for e in up),
            },
            "engines": [engine_row(e) for e in troubled[:MAX_ENGINES]],
            "engines_left_out": max(0, len(state.engines) - MAX_ENGINES),
            "requests": [request_row(r) for r in state.requests[:MAX_REQUESTS]],
            "requests_left_out": max(0, len(state.requests) - MAX_REQUESTS),
            "ends": [plain(d) for d in ends],
            "revisions": [revision_row(r) for r in await self._policies.history(MAX_REVISIONS)],
            "rollouts": [plain(r.message()) for r in await self._rollouts.history(MAX_ROLLOUTS)],
        }

    async def _ends(self) -> list[fleet_pb2.LoggedDecision]:
        """Decisions to end thinking, newest first; of the caps, which every request has, those that were reached."""
        forces, caps = await asyncio.gather(
            *(
                why.decisions(self._whole, fleet_pb2.ListDecisionsRequest(kind=kind, page_size=ASKED_DECISIONS))
                for kind in ("force", "cap")
            )
        )
        reached = (d for d in caps.decisions if d.outcome in CARRIED_OUT)
        newest = sorted((*forces.decisions, *reached), key=lambda d: -d.time.ToNanoseconds())
        return newest[:MAX_DECISIONS]


def _offer(viewer: asyncio.Queue[bytes | None], event: bytes | None) -> None:
    """What a viewer is to get next; one that is slow to read misses what came before."""
    if viewer.full():
        viewer.get_nowait()
    viewer.put_nowait(event)


def trouble(text: str) -> bytes:
    return b"event: trouble\ndata: " + json.dumps(text).encode() + b"\n\n"


def plain(message: Message) -> dict[str, Any]:
    """A message as JSON has it, with the proto's own names; NaN is left out, as nothing was measured."""
    return _finite(MessageToDict(message, preserving_proto_field_name=True))  # type: ignore[no-any-return]


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items() if v not in ("NaN", "Infinity", "-Infinity")}
    return [_finite(v) for v in value] if isinstance(value, list) else value


def is_troubled(engine: fleet_pb2.Engine) -> bool:
    """Whether somebody should look at it."""
    lost = engine.state != fleet_pb2.CONNECTION_STATE_CONNECTED
    return bool(lost or engine.fault or engine.nack_error or engine.HasField("freeze"))


def revision_row(header: RevisionHeader) -> dict[str, Any]:
    return {
        "revision": header.revision,
        "author": header.author,
        "reason": header.reason,
        "create_time": header.created_at.isoformat(),
    }


def engine_row(engine: fleet_pb2.Engine) -> dict[str, Any]:
    return {
        "id": engine.engine_id,
        "incarnation": engine.incarnation,
        "model": engine.model,
        "connected": engine.state == fleet_pb2.CONNECTION_STATE_CONNECTED,
        "state": agent_pb2.AgentState.Name(engine.agent_state).removeprefix("AGENT_STATE_"),
        "frozen": engine.HasField("freeze"),
        "fault": engine.fault,
        "nack_error": engine.nack_error,
        "revision": engine.revision,
        "acked_revision": engine.acked_revision,
        "thinking": engine.thinking,
        "answering": engine.answering,
        "waiting": engine.waiting,
        "kv_used": round(engine.kv_used, 3),
        "step_time_ms": round(engine.step_time_ms, 1),
        "ends": dict(engine.ends),
    }


def request_row(request: fleet_pb2.LiveRequest) -> dict[str, Any]:
    last = request.last_decision
    eat = request.eat_ema_nats
    return {
        "id": request.request_id,
        "engine": request.engine_id,
        "tenant": request.tenant,
        "phase": agent_pb2.Phase.Name(request.phase).removeprefix("PHASE_").lower(),
        "preempted": request.preempted,
        "think_tokens": request.think_tokens,
        "output_tokens": request.output_tokens,
        "eat_ema_nats": None if math.isnan(eat) else round(eat, 4),
        "last_decision": f"{last.kind}: {last.reason}" if last.decision_id else "",
    }
