"""Lets a gateway, and not the client, name the tenant and the SLO class of the requests to vLLM's API servers.

The process that serves HTTP reads both from the headers, or from `user` in the request's body, and writes them as bytes
into the sampling parameters of the engine core's request, in place of what the client has written there. A request that
came to this process without HTTP, such as one of a program that calls vLLM itself, then has neither, unless it has a
`user` that is read.
"""

from __future__ import annotations

import functools
import logging
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from meridian_agent.core.request_info import ASKED_SLO_CLASS, SLO_CLASS, TENANT, distinct
from meridian_agent.core.request_sources import USER, RequestSources, Sender
from meridian_agent.vllm_adapter import after_import, required_api

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger("vllm.meridian")

WITHOUT = "requests have no tenant and no SLO class"
# The sender of the HTTP request that a task serves, without keys and tokens: tasks that live on, such as the one that
# reads the engine's outputs, keep the context of the request that began them. All tasks of a request share one object,
# because vLLM reads `user` in another task than the one that streams the answer.
SENDER: ContextVar[Sender | None] = ContextVar("meridian_sender", default=None)


def install(sources: RequestSources) -> None:
    """Wrap FastAPI's applications, the class that makes the engine core's requests, and for `user` the request classes,
    now or when this process imports them. Does nothing if no source is set."""
    if sources == RequestSources():
        return
    after_import.wrap(required_api.HTTP, functools.partial(_wrap_application, sources), WITHOUT)
    after_import.wrap(required_api.INPUTS, _wrap_inputs, WITHOUT)
    if sources.tenant is not None and sources.tenant.kind == USER:
        after_import.wrap(required_api.WITH_USER, _wrap_request, WITHOUT)


def _wrap_application(sources: RequestSources, application_class: Any) -> None:
    call = application_class.__call__

    @functools.wraps(call)
    async def answer(self: Any, scope: Any, receive: Any, send: Any) -> None:
        sender = Sender()
        try:
            if scope["type"] in {"http", "websocket"}:
                sender = sources.read(scope["headers"])
        except Exception:
            # The traceback would not show the headers, but a client may be able to cause it as often as it likes.
            logger.debug("meridian: the sender of a request could not be read", exc_info=True)
        token = SENDER.set(sender)
        try:
            await call(self, scope, receive, send)
        finally:
            SENDER.reset(token)

    application_class.__call__ = answer


def _wrap_request(request_class: Any) -> None:
    request_class.to_sampling_params = _noting_user(request_class.to_sampling_params)
    if hasattr(request_class, "to_beam_search_params"):
        request_class.to_beam_search_params = _noting_user(request_class.to_beam_search_params)


def _noting_user(convert: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that makes the parameters of a request, wrapped so that it notes the request's `user`, too."""

    @functools.wraps(convert)
    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (sender := SENDER.get()) is None:
            # The HTTP ends in another process, or there is none.
            SENDER.set(sender := Sender())
        sender.tenant = distinct(user) if isinstance(user := getattr(self, "user", None), str) else ""
        return convert(self, *args, **kwargs)

    return noting


def _wrap_inputs(inputs_class: Any) -> None:
    process: Callable[..., Any] = inputs_class.process_inputs

    @functools.wraps(process)
    def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = process(self, *args, **kwargs)
        if (params := request.sampling_params) is not None:
            # The dictionary belongs to the caller's parameters, too.
            params.extra_args = named(SENDER.get() or Sender(), params.extra_args or {})
        return request

    inputs_class.process_inputs = process_inputs


def named(sender: Sender, extra: dict[str, Any]) -> dict[str, Any]:
    """Return a request's own values with the sender's tenant and SLO class in place of the client's. The SLO class that
    the client has written becomes a wish, which the policy may let it have."""
    kept = {name: value for name, value in extra.items() if name not in {TENANT, SLO_CLASS, ASKED_SLO_CLASS}}
    facts = {TENANT: sender.tenant.encode(), SLO_CLASS: sender.slo_class.encode()}
    said = {**facts, ASKED_SLO_CLASS: extra.get(SLO_CLASS)}
    return kept | {name: value for name, value in said.items() if value}
