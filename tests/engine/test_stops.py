"""Stop strings and stop tokens that sleep while the model thinks, on the real engine.

`test_stop_strings` divides tokens into steps in every way; `tests/engine/matrix` compares stop tokens and stop strings
with stock's on both runners, under asynchronous scheduling and with drafts.
"""

from __future__ import annotations

import functools
import pickle
import time
from typing import Any, NamedTuple

import pytest
from vllm import SamplingParams

from meridian_agent.vllm_adapter.stop_tokens import SleepingTokens, stop_also_after
from tests.engine import SHORT, Run, confirmed, prompt_ids
from tests.engine.ctl import ctl
from tests.engine.pacing import Settled
from tests.engine.policies import NEUTRAL
from tests.engine.test_decisions import OPEN
from tests.engine.test_fail_static import kill, lost  # noqa: F401 - a fixture
from tests.processes import Control, wait_for

# Name of the entry in vllm_xargs.
OWN = "meridian_answer_only_stops"
ANSWER_ONLY: dict[str, Any] = {**NEUTRAL, "scheduler": {**NEUTRAL["scheduler"], "answer_only_stops": "chat"}}
MARKER = "</think>"
KINDS = ("string", "token")
# Where a request stops.
THINKING, ANSWER = "in the thinking", "in the answer"


class Said(NamedTuple):
    tokens: list[int]
    text: str
    finish: str
    stop: Any


def ask(llm: Any, *params: dict[str, Any], own: int | None = None, is_chat: bool = True) -> list[Said]:
    """Ask the same at once with each of these parameters."""
    extra = {OWN: own} if own is not None else None
    sampling = [SamplingParams(temperature=0.0, max_tokens=400, extra_args=extra, **each) for each in params]
    if is_chat:
        turns = [{"role": "user", "content": SHORT[0]}]
        outputs = llm.chat([turns] * len(params), sampling, chat_template_kwargs=OPEN, use_tqdm=False)
    else:
        prompt = {"prompt_token_ids": prompt_ids(llm, {"prompt": SHORT[0], "template": OPEN})}
        outputs = llm.generate([prompt] * len(params), sampling, use_tqdm=False)
    return [said_of(one) for output in outputs for one in output.outputs]


def said_of(one: Any) -> Said:
    return Said(list(one.token_ids), one.text, one.finish_reason, one.stop_reason)


class Stops(NamedTuple):
    """A word and a token that the model writes in its thinking and in its answer, and what it says without them."""

    free: Said
    word: str
    token: int

    def places(self, llm: Any, own: int | None = None, *, is_chat: bool = True) -> list[str]:
        """Return where a request with the stop string stops, and one with the stop token."""
        said = ask(llm, *(self.params(kind) for kind in KINDS), own=own, is_chat=is_chat)
        return [self.place(each, kind) for each, kind in zip(said, KINDS, strict=True)]

    def place(self, said: Said, kind: str) -> str:
        return THINKING if self.in_thinking(said, kind) else ANSWER if self.in_answer(said, kind) else str(said)

    def params(self, kind: str, **more: Any) -> dict[str, Any]:
        return {("stop" if kind == "string" else "stop_token_ids"): [self.reason(kind)], **more}

    def reason(self, kind: str) -> Any:
        return self.word if kind == "string" else self.token

    def in_thinking(self, said: Said, kind: str) -> bool:
        return said.stop == self.reason(kind) and MARKER not in said.text

    def in_answer(self, said: Said, kind: str) -> bool:
        """Whether a request has stopped where the stop occurs in the answer first."""
        tokens, text = self.free.tokens, self.free.text
        if kind == "string":
            return said[1:] == (text[: text.index(self.word, text.index(MARKER))], "stop", self.word)
        at = tokens.index(self.token, self._end)
        return (said.tokens, *said[2:]) == (tokens[: at + 1], "stop", self.token)

    @property
    def _end(self) -> int:
        return next(at for at, token in enumerate(self.free.tokens) if token == 5)


@functools.cache
def stops_of(llm: Any, agent: Any) -> Stops:
    """Return what `stops` does; the free run is the same for all tests."""
    (free,), end = ask(llm, {}), agent.tracker.markers.end[0]
    assert (end, free.finish, free.stop) == (5, "stop", None)
    thinking, answer = free.tokens[: free.tokens.index(end)], free.tokens[free.tokens.index(end) + 2 :]
    token = next(token for token in answer if token in thinking and llm.get_tokenizer().decode([token]).isalpha())
    return Stops(free, llm.get_tokenizer().decode([token]), token)


@pytest.fixture
def stops(llm: Any, agent: Any) -> Stops:
    """Return the stops that are found under the neutral policy, which is in force when a test begins."""
    return stops_of(llm, agent)


def test_by_default_a_chat_stops_in_its_answer_and_a_completion_in_its_thinking(
    llm: Any, control: Control, stops: Stops
) -> None:
    """In stock vLLM a chat whose thinking repeats a stop string has no answer."""
    assert stops.places(llm) == [THINKING] * 2, "the policy lets no stop sleep"
    control.apply({})
    assert stops.places(llm) == [ANSWER] * 2
    assert stops.places(llm, is_chat=False) == [THINKING] * 2


@pytest.mark.parametrize(
    ("requests", "own", "is_chat", "sleep"),
    [
        ("chat", 0, True, False),
        ("chat", 1, False, True),
        ("all", None, False, True),
        ("all", 0, False, False),
        ("none", 1, True, True),
        ("none", None, True, False),
    ],
)
def test_the_request_has_the_last_word(  # noqa: PLR0917
    llm: Any, control: Control, stops: Stops, requests: str, own: int | None, is_chat: bool, sleep: bool
) -> None:
    control.apply({"scheduler": {"answer_only_stops": requests, "answer_reserve_tokens": 0}})
    assert stops.places(llm, own, is_chat=is_chat) == [ANSWER if sleep else THINKING] * 2


def test_frozen_in_shadow_or_disabled_stops_are_stocks(llm: Any, control: Control, stops: Stops) -> None:
    for off in ({"shadow": True}, {"enabled": False}):
        control.apply({"scheduler": {"answer_only_stops": "all", **off}})
        assert stops.places(llm, 1) == [THINKING] * 2
    control.apply({"scheduler": {"answer_only_stops": "all"}})
    control.freeze()
    confirmed(control, True)
    assert stops.places(llm, 1) == [THINKING] * 2
    control.thaw()
    confirmed(control, False)
    assert stops.places(llm, 1) == [ANSWER] * 2


def test_in_shadow_a_stop_that_would_sleep_counts_as_unended(llm: Any, control: Control, stops: Stops) -> None:
    control.apply({"scheduler": {"answer_only_stops": "all", "shadow": True}})
    before = control.settled().answers["unended"]
    *stopped, free = ask(llm, *(stops.params(kind) for kind in KINDS), {})
    assert [stops.place(said, kind) for said, kind in zip(stopped, KINDS, strict=True)] == [THINKING] * 2
    assert free == stops.free
    assert control.settled().answers["unended"] == before + 2


@pytest.mark.usefixtures("lost")
def test_past_the_lease_stops_are_stocks(llm: Any, agent: Any, control: Control, stops: Stops) -> None:
    control.apply({**ANSWER_ONLY, "scheduler": {**ANSWER_ONLY["scheduler"], "lease_ms": 60_000}})
    assert stops.places(llm) == [ANSWER] * 2
    kill(control, agent)
    assert stops.places(llm) == [ANSWER] * 2
    agent.link.lease.clock = lambda: time.monotonic() + 61
    assert stops.places(llm) == [THINKING] * 2


@pytest.mark.parametrize("named", [{"stop": ["x", MARKER]}, {"stop": [MARKER + "\n"]}, {"stop_token_ids": [5]}])
def test_a_request_that_names_a_marker_stops_as_in_stock(
    llm: Any, control: Control, stops: Stops, named: dict[str, Any]
) -> None:
    (before,) = ask(llm, named)
    both = {"stop": [stops.word, *named.get("stop", [])], "stop_token_ids": named.get("stop_token_ids", [])}
    control.apply(ANSWER_ONLY)
    same, stopped = ask(llm, named, both)
    assert same == before
    assert stops.in_thinking(stopped, "string")


def test_a_string_that_begins_in_the_thinking_does_not_count(llm: Any, control: Control, stops: Stops) -> None:
    control.apply(ANSWER_ONLY)
    at = stops.free.text.index(MARKER)
    across = stops.free.text[at + 3 : at + len(MARKER) + 3]
    assert ask(llm, {"stop": [across]}) == [stops.free]


def test_the_answer_ends_before_or_after_the_string(llm: Any, control: Control, stops: Stops) -> None:
    control.apply(ANSWER_ONLY)
    said = ask(llm, *(stops.params("string", include_stop_str_in_output=include) for include in (False, True)))
    text = stops.free.text
    at = text.index(stops.word, text.index(MARKER))
    assert [each.text for each in said] == [text[:at], text[: at + len(stops.word)]]


def test_each_sequence_of_a_request_stops_in_its_answer(llm: Any, control: Control, stops: Stops) -> None:
    control.apply(ANSWER_ONLY)
    params = [SamplingParams(n=2, temperature=1.0, top_k=1, max_tokens=400, **stops.params(kind)) for kind in KINDS]
    turns = [{"role": "user", "content": SHORT[0]}]
    outputs = llm.chat([turns] * 2, params, chat_template_kwargs=OPEN, use_tqdm=False)
    places = [
        [stops.place(said_of(one), kind) for one in each.outputs] for each, kind in zip(outputs, KINDS, strict=True)
    ]
    assert places == [[ANSWER] * 2] * 2


def test_a_freeze_in_the_thinking_wakes_stops(llm: Any, agent: Any, control: Control, stops: Stops) -> None:
    control.apply({"scheduler": {"answer_only_stops": "all", "answer_reserve_tokens": 0}})
    prompt, run = prompt_ids(llm, {"prompt": SHORT[0], "template": OPEN}), Run(llm)
    first = stops.free.tokens.index(stops.token)
    run.put("r", prompt, SamplingParams(temperature=0.0, max_tokens=400, stop_token_ids=[stops.token]))
    run.until(lambda: len(run.tokens["r"]) == first + 1)
    control.freeze()
    wait_for(agent.link.lease.frozen, 20, "the freeze to arrive")
    run.until()
    second = stops.free.tokens.index(stops.token, first + 1)
    assert second < stops.free.tokens.index(5)
    assert run.tokens["r"] == stops.free.tokens[: second + 1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_leaves_stock(  # noqa: PLR0917
    llm: Any, agent: Any, scheduler: Any, control: Control, stops: Stops, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("made by the test")

    control.apply(ANSWER_ONLY)
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(type(agent.answer_only), "note_strings" if kind == "string" else "token_sleeps", fails)
        (stopped,) = ask(llm, stops.params(kind))
        assert stops.in_thinking(stopped, kind)
    assert "(fails)" in scheduler._guard.fault
    scheduler._guard._back_at = 0.0
    assert ask(llm, {}) == [stops.free]
    assert not scheduler._guard.fault
    (stopped,) = ask(llm, stops.params(kind))
    assert stops.in_answer(stopped, kind)


def test_explain_says_that_stops_sleep(llm: Any, control: Control, settled: Settled, stops: Stops) -> None:
    prompt, run = prompt_ids(llm, {"prompt": SHORT[0], "template": OPEN}), Run(llm)
    control.apply({"scheduler": {"answer_only_stops": "all"}})
    for name, kind in (("by-string", "string"), ("by-token", "token"), ("none", "")):
        params = stops.params(kind) if kind else {}
        run.put(name, prompt, SamplingParams(temperature=0.0, max_tokens=9, **params))
    run.until(settled=settled)
    control.settled()
    assert [control.explain(name).sleeping_stops for name in run.tokens] == [True, True, False]
    assert "max_tokens 9; its stops sleep while it thinks" in ctl(control, "explain", "by-token")


def test_a_request_without_stops_has_vllms_own_list(llm: Any, agent: Any, scheduler: Any, control: Control) -> None:
    """So has a request whose stop tokens are the model's own. Workers get a plain list."""
    control.apply(ANSWER_ONLY)
    prompt, run = prompt_ids(llm, {"prompt": SHORT[0], "template": OPEN}), Run(llm)
    for name, tokens in (("without", []), ("ends", [*agent.tracker.markers.turn_ends]), ("with", [20, 21])):
        run.put(name, prompt, SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, stop_token_ids=tokens))
    found = {r.request_id.split("-")[0]: r.sampling_params.stop_token_ids for r in scheduler.requests.values()}
    assert {name: type(tokens) for name, tokens in found.items()} == {
        "without": list,
        "ends": list,
        "with": SleepingTokens,
    }
    again = pickle.loads(pickle.dumps(found["with"]))
    assert (type(again), again) == (list, [20, 21])
    # A handover adds the end markers, which do not sleep.
    request = next(r for r in scheduler.requests.values() if r.request_id.startswith("with-"))
    assert stop_also_after(request, [5]) == [20, 21]
    assert (type(request.sampling_params.stop_token_ids), [*request.sampling_params.stop_token_ids]) == (
        SleepingTokens,
        [20, 21, 5],
    )
    assert not agent.answer_only.with_strings
    run.until()
