"""Whose request it is, as the process that serves HTTP writes it into the engine core's request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import copy_context
from types import SimpleNamespace
from typing import Any

import pytest

from meridian_agent.core.request_sources import RequestSources, Source

pytestmark = pytest.mark.filterwarnings("ignore")

XARGS = {"meridian_tenant": "rich", "meridian_user": "rich", "top": 1}


class Inputs:
    def process_inputs(self, extra: dict[str, Any] | None) -> Any:
        return SimpleNamespace(sampling_params=SimpleNamespace(extra_args=extra))


class WithUser:
    def __init__(self, user: object) -> None:
        self.user = user

    def to_sampling_params(self) -> SimpleNamespace:
        return SimpleNamespace(extra_args=dict(XARGS))

    def to_beam_search_params(self) -> SimpleNamespace:
        """Return parameters without extra arguments, as vLLM does."""
        return SimpleNamespace()


class Application:
    """Converts a request as vLLM's servers do: in a task of its own, so that a disconnect can end it."""

    def __init__(self, convert: Callable[[], SimpleNamespace], inputs: Inputs) -> None:
        self.convert, self.inputs = convert, inputs
        self.extra: dict[str, Any] = {}

    async def __call__(self, scope: object, receive: object, send: object) -> None:
        async def converted() -> SimpleNamespace:
            return self.convert()

        self.extra = processed(await asyncio.create_task(converted()), self.inputs)


def processed(params: SimpleNamespace, inputs: Inputs) -> dict[str, Any]:
    extra: dict[str, Any] = inputs.process_inputs(getattr(params, "extra_args", None)).sampling_params.extra_args
    return extra


@pytest.mark.parametrize(
    ("user", "tenant"),
    [("small", b"small"), ("", b""), (None, b""), (7, b""), (["rich"], b""), ("\ud800", b"\\ud800")],
)
def test_no_client_names_its_user_but_by_the_field(user: object, tenant: bytes) -> None:
    """The field names the tenant of sampling and of beam search, also of a request that came without HTTP. A request of
    a class without the field, such as one with token ids, has no tenant, whatever it has written."""
    from meridian_agent.vllm_adapter import gateway

    inputs: type[Inputs] = type("OwnInputs", (Inputs,), {})
    with_user: type[WithUser] = type("OwnRequest", (WithUser,), {})
    app: type[Application] = type("OwnApplication", (Application,), {})
    sources = RequestSources(Source("user"))
    gateway._wrap_application(sources, app)
    gateway._wrap_inputs(inputs)
    gateway._wrap_request(with_user)

    def answered(convert: Callable[[], SimpleNamespace]) -> dict[str, Any]:
        return processed(convert(), inputs())

    named = {"meridian_tenant": tenant} if tenant else {}
    request = with_user(user)
    for convert, expected in (
        (request.to_sampling_params, {"top": 1} | named),
        (request.to_beam_search_params, named),
        (lambda: SimpleNamespace(extra_args=dict(XARGS)), {"top": 1}),
    ):
        server = app(convert, inputs())
        asyncio.run(server({"type": "http", "headers": []}, None, None))
        server.extra.pop("meridian_user", None)
        assert server.extra == expected
        without_http = copy_context().run(answered, convert)
        without_http.pop("meridian_user", None)
        assert without_http == expected
