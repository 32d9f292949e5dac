"""Marks for the causes of aborts, on a front end of the shape of vLLM's; the engine tests run vLLM's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from meridian_agent.vllm_adapter import front_end_aborts as aborts


class Processor:
    """Aborts a parent's choices by calling itself, as vLLM's OutputProcessor does."""

    choices: ClassVar[dict[str, list[str]]] = {"parent": ["0_parent", "1_parent"]}

    def process_outputs(self, outputs: list[str]) -> SimpleNamespace:
        return SimpleNamespace(reqs_to_abort=list(outputs))

    def abort_requests(self, request_ids: list[str], internal: bool) -> list[str]:
        found: list[str] = []
        for name in request_ids:
            found += self.abort_requests(self.choices[name], internal) if name in self.choices else [name]
        return found


@pytest.fixture
def processor() -> Any:
    wrapped = type("Wrapped", (Processor,), dict(vars(Processor)))
    aborts._wrap(wrapped)
    return wrapped()


def test_each_abort_says_its_cause(processor: Any) -> None:
    stopped = processor.process_outputs(["a", "b"]).reqs_to_abort
    gone = processor.abort_requests(["parent", "c"], internal=True)
    assert stopped[:2] == ["a", "b"]
    assert len(gone) == len(set(gone)), "each choice has one mark"
    # The engine core reads several messages as one list.
    assert aborts.causes([*stopped, *gone, "unmarked"]) == {
        "a": aborts.STOP,
        "b": aborts.STOP,
        "0_parent": aborts.GONE,
        "1_parent": aborts.GONE,
        "c": aborts.GONE,
    }
    assert processor.process_outputs([]).reqs_to_abort == []


@pytest.mark.parametrize("given", [None, "a", [], ["a"]])
def test_without_marks_the_cause_is_unknown(given: Any) -> None:
    assert aborts.causes(given) == {}


def test_marks_go_to_the_engine_of_their_request() -> None:
    marked = ["a", "b", "meridian-stop:a", "meridian-gone:b", "meridian-gone:finished"]
    assert aborts._places(marked, {"a": b"0", "b": b"1"}) == {"meridian-stop:a": b"0", "meridian-gone:b": b"1"}
