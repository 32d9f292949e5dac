"""Tells the engine core why vLLM's front end aborts a request: it has seen a stop string, or its client has gone.

vLLM's engine core gets nothing but the ids of requests to abort, in one message for both cases, so that an answer that
ends at a stop string looks like a disconnect. The front end's OutputProcessor knows the cause: `process_outputs` names
the requests that have reached a stop string, and `abort_requests` is called for clients that have gone. `install` lets
both add a mark for each id, which is an id that no request has; vLLM ignores ids that it does not know, because an
abort may come after the end. The scheduler's hook reads the marks. vLLM's load balancer over data-parallel engines
sends each id to the engine that has the request, so it learns where a mark belongs. If the front end has no hook, the
cause stays unknown.

Runs on the front end's event loop and, for `causes`, on the engine-core thread.
"""

from __future__ import annotations

import functools
import importlib
import logging
from typing import TYPE_CHECKING, Any

from meridian_agent.vllm_adapter import required_api

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger("vllm.meridian")

STOP, GONE = "stop", "client_gone"
_MARKS = {STOP: "meridian-stop:", GONE: "meridian-gone:"}
_MARK_CHARS = len(_MARKS[STOP])


def install() -> None:
    """Wrap the two methods of vLLM's front end."""
    if lacks := required_api.missing(required_api.Imported(), required_api.FRONT_END):
        logger.warning("meridian: vLLM lacks %s: stop strings look like disconnects", ", ".join(lacks))
        return
    _wrap(importlib.import_module("vllm.v1.engine.output_processor").OutputProcessor)
    if not required_api.missing(required_api.Imported(), required_api.BALANCER):
        _wrap_balancer(importlib.import_module("vllm.v1.engine.core_client").DPLBAsyncMPClient)


def _wrap(processor: Any) -> None:
    process, abort = processor.process_outputs, processor.abort_requests

    @functools.wraps(process)
    def process_outputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        done = process(self, *args, **kwargs)
        if done.reqs_to_abort:
            _marking(lambda: done.reqs_to_abort.extend(_marks(STOP, done.reqs_to_abort)))
        return done

    @functools.wraps(abort)
    def abort_requests(self: Any, *args: Any, **kwargs: Any) -> Any:
        ids = abort(self, *args, **kwargs)
        # vLLM calls itself for the choices of a request, whose ids then have marks already.
        _marking(lambda: ids.extend(_marks(GONE, ids)))
        return ids

    processor.process_outputs, processor.abort_requests = process_outputs, abort_requests


def _wrap_balancer(client: Any) -> None:
    abort = client.abort_requests_async

    @functools.wraps(abort)
    async def abort_requests_async(self: Any, request_ids: Any, *args: Any, **kwargs: Any) -> Any:
        placed: dict[str, Any] = {}
        _marking(lambda: placed.update(_places(request_ids, self.reqs_in_flight)))
        self.reqs_in_flight.update(placed)
        try:
            return await abort(self, request_ids, *args, **kwargs)
        finally:
            for mark in placed:
                self.reqs_in_flight.pop(mark, None)

    client.abort_requests_async = abort_requests_async


def _places(request_ids: list[str], engines: dict[str, Any]) -> dict[str, Any]:
    """Return the engine of each mark among these ids. engines: the engine of each request."""
    places = {name: engines.get(name[_MARK_CHARS:]) for name in request_ids if name[:_MARK_CHARS] in _MARKS.values()}
    return {mark: engine for mark, engine in places.items() if engine is not None}


def _marking(mark: Callable[[], None]) -> None:
    try:
        mark()
    except Exception:
        logger.exception("meridian: an abort has no cause")


def _marks(cause: str, ids: list[str]) -> list[str]:
    """Return the marks of those ids that have none yet."""
    known = set(ids)
    marks = (_MARKS[cause] + name for name in ids if name[:_MARK_CHARS] not in _MARKS.values())
    return [mark for mark in marks if mark not in known]


def causes(request_ids: Any) -> dict[str, str]:
    """Return the cause, STOP or GONE, of each aborted request of which it is known. request_ids: the ids that vLLM's
    scheduler was given, with marks; one id, or None for all requests."""
    if request_ids is None or isinstance(request_ids, str):
        return {}
    return {
        name[_MARK_CHARS:]: cause for cause, mark in _MARKS.items() for name in request_ids if name.startswith(mark)
    }
