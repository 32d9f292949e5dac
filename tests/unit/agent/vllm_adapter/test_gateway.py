"""Whose request it is, as the process that serves HTTP writes it into the engine core's request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from meridian_agent.core.request_sources import RequestSources, Source

pytestmark = pytest.mark.filterwarnings("ignore")

BY_USER = RequestSources(Source("user"))


class Inputs:
    def process_inputs(self, extra: dict[str, Any] | None) -> Any:
        return SimpleNamespace(sampling_params=SimpleNamespace(extra_args=extra))


class WithUser:
    def __init__(self, user: object, extra: dict[str, Any] | None) -> None:
        self.user, self.vllm_xargs = user, extra

    def to_sampling_params(self) -> Any:
        return SimpleNamespace(extra_args=self.vllm_xargs)


@pytest.mark.parametrize(
    ("user", "expected"), [("small", {"meridian_tenant": b"small"}), ("", {}), (None, {}), (7, {}), (["rich"], {})]
)
@pytest.mark.parametrize("written", ["rich", ["rich"], None])
def test_no_client_names_its_user_but_by_the_field(user: object, expected: dict[str, bytes], written: object) -> None:
    """A request of a class without the field, such as one with token ids, has no tenant, whatever it has written under
    the name by which the process passes the field on."""
    from meridian_agent.vllm_adapter import gateway

    inputs, with_user = type("Own", (Inputs,), {}), type("OwnRequest", (WithUser,), {})
    gateway._wrap_inputs(BY_USER, inputs)
    gateway._wrap_request(with_user)
    xargs = {"meridian_tenant": "rich", "top": 1} | ({} if written is None else {gateway.GIVEN_USER: written})
    params = with_user(user, dict(xargs)).to_sampling_params()
    assert inputs().process_inputs(params.extra_args).sampling_params.extra_args == {"top": 1} | expected
    assert inputs().process_inputs(dict(xargs)).sampling_params.extra_args == {"top": 1}
