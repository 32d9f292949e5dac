"""vLLM's own request classes copy a client's effort into their sampling parameters, or are left as they are."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from meridian_agent.core.request_info import CANDIDATE, CHAT, TEMPLATE, UNKNOWN_TEMPLATE
from meridian_agent.vllm_adapter import client_effort, required_api
from tests.processes import Process

UNCOPIED = "meridian: vLLM lacks %s: the effort that its clients name reaches no policy"


class Classes(NamedTuple):
    chat: Any
    responses: Any


@pytest.fixture
def classes(monkeypatch: pytest.MonkeyPatch) -> Classes:
    """Return the two classes with vLLM's own methods, which are restored after the test."""
    # The import gives warnings, so it is not made while tests are collected.
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    for request_class in (ChatCompletionRequest, ResponsesRequest):
        method: Any = vars(request_class)[client_effort.METHOD]
        monkeypatch.setattr(request_class, client_effort.METHOD, getattr(method, "__wrapped__", method))
    return Classes(ChatCompletionRequest, ResponsesRequest)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, {}),
        ({"reasoning_effort": "low"}, {"meridian_effort": "low"}),
        ({"reasoning_effort": "max", "vllm_xargs": {"a": 1}}, {"a": 1, "meridian_effort": "max"}),
        ({"reasoning_effort": "low", "vllm_xargs": {"meridian_effort": "own"}}, {"meridian_effort": "own"}),
        ({"reasoning_effort": "low", "vllm_xargs": {"meridian_effort": ""}}, {"meridian_effort": ""}),
        ({"vllm_xargs": {"a": 1}}, {"a": 1}),
        ({"return_token_ids": True}, {TEMPLATE: UNKNOWN_TEMPLATE}),
        # A relay asks for the tokens of its own accord.
        ({"return_token_ids": True, "vllm_xargs": {CANDIDATE: 1}}, {CANDIDATE: 1}),
    ],
)
def test_a_chat_completion(classes: Classes, said: dict[str, Any], expected: dict[str, Any]) -> None:
    client_effort.install()
    request = classes.chat(messages=[], **said)
    for _ in range(2):
        assert request.to_sampling_params(9, {}).extra_args == {**expected, CHAT: 1}
    assert request.vllm_xargs == said.get("vllm_xargs"), "the client's own request was changed"


@pytest.mark.parametrize(
    ("reasoning", "expected"), [(None, {}), ({}, {}), ({"effort": "xhigh"}, {"meridian_effort": "xhigh"})]
)
def test_a_response(classes: Classes, reasoning: dict[str, Any] | None, expected: dict[str, Any]) -> None:
    client_effort.install()
    assert classes.responses(input="", reasoning=reasoning).to_sampling_params(9).extra_args == {**expected, CHAT: 1}


def test_a_request_that_cannot_be_read_is_sent_as_it_is(classes: Classes) -> None:
    """An exception of the agent never reaches vLLM, but vLLM's own exceptions reach its caller."""

    class Odd(classes.chat):  # type: ignore[name-defined, misc]
        @property
        def reasoning(self) -> Any:
            raise KeyError("reasoning")

    client_effort.install()
    request = Odd(messages=[], reasoning_effort="low", vllm_xargs={"a": 1})
    assert request.to_sampling_params(9, {}).extra_args == {"a": 1}
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match="max_tokens"):
        request.to_sampling_params(-9, {})


def test_a_method_that_is_gone_leaves_the_others(
    classes: Classes, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """vLLM's API server has imported its classes before the plugin is loaded."""
    monkeypatch.delattr(classes.chat, client_effort.METHOD)
    with caplog.at_level(logging.WARNING, "vllm.meridian"):
        client_effort.install()
    assert [record.getMessage() for record in caplog.records] == [UNCOPIED % "ChatCompletionRequest.to_sampling_params"]
    response = classes.responses(input="", reasoning={"effort": "high"}).to_sampling_params(9)
    assert response.extra_args == {"meridian_effort": "high", CHAT: 1}


def test_a_vllm_without_the_classes_says_so(classes: Classes, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, "vllm.meridian"):
        client_effort.install()
        assert not caplog.records
        tables = {**required_api.API_SERVER, "vllm.entrypoints.moved:ChatCompletionRequest": ()}
        monkeypatch.setattr(required_api, "API_SERVER", tables)
        monkeypatch.setattr(required_api, "BUDGET", {"vllm.sampling_params:SamplingParams": ("no_such_budget",)})
        client_effort.install()
    assert [record.getMessage() for record in caplog.records] == [
        UNCOPIED % "vllm.entrypoints.moved",
        "meridian: vLLM lacks SamplingParams.no_such_budget: clients' budgets reach no policy",
    ]
    assert vars(classes.chat)[client_effort.METHOD].__wrapped__


def test_classes_that_are_imported_later(tmp_path: Path) -> None:
    process = Process([sys.executable, "-m", "tests.engine.late"], tmp_path / "log")
    assert process.popen.wait() == 0, process.output()
