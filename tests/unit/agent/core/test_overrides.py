"""Values that clients write into vllm_xargs never do harm: the agent reads them, or ignores and names them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from meridian.v1 import agent_pb2

from meridian_agent.core.phases import NO_MARKERS, Markers
from meridian_agent.core.request_info import (
    ANSWER_ONLY_STOPS,
    ASKED_SLO_CLASS,
    CANDIDATE,
    CHAT,
    MAX_TEXT,
    MAX_TOKENS,
    OPEN_TAIL_TOKENS,
    SLO_CLASS,
    TEMPLATE,
    TENANT,
    UNKNOWN_TEMPLATE,
    RequestInfo,
    budget_of,
    info_of,
    read,
)
from meridian_agent.link.messages import opened_message

CAP, FLOOR = "meridian_max_think_tokens", "meridian_min_think_tokens"


@pytest.mark.parametrize(
    ("value", "cap"), [(0, 0), (7, 7), (7.9, 7), (2**40, MAX_TOKENS), (1e300, MAX_TOKENS), (10**400, MAX_TOKENS)]
)
def test_a_cap_is_read(value: float, cap: int) -> None:
    assert read({CAP: value}).max_think_tokens == cap
    assert not read({CAP: value}).complaint


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, -math.inf, True, "12", [3], {"a": 1}])
def test_an_unusable_cap_is_named_and_ignored(value: object) -> None:
    overrides = read({CAP: value})
    assert overrides.max_think_tokens is None
    assert overrides.complaint.startswith("meridian_max_think_tokens must be")


def test_a_number_too_long_to_print() -> None:
    assert read({"meridian_tenant": 10**5000, CAP: -(10**5000)})[:1] == ("",)


@pytest.mark.parametrize(("value", "kind"), [(["a"], "list"), ({"a": "b"}, "dict"), ((), "tuple")])
def test_a_name_that_is_no_text_is_ignored(value: object, kind: str) -> None:
    """The complaint has the type alone, because printing a large list would take the engine's time."""
    overrides = read({"meridian_tenant": value, "meridian_effort": 3})
    assert (overrides.tenant, overrides.effort) == ("", "3")
    assert overrides.complaint == f"meridian_tenant must be a text; got a {kind}"
    # The client has not written the name under which the gateway's process passes its class on.
    assert read({ASKED_SLO_CLASS: value}).complaint == f"meridian_slo_class must be a text; got a {kind}"
    assert f"got 'a {kind}'" in read({CAP: value}).complaint


@pytest.mark.parametrize(("by_gateway", "named"), [(False, ("rich", "gold")), (True, ("", ""))])
def test_what_a_client_has_written_is_no_gateways_name(by_gateway: bool, named: tuple[str, str]) -> None:
    """A front end without the agent, such as vLLM's in Rust, hands on what the client has written, which is JSON."""
    said = {TENANT: "rich", SLO_CLASS: "gold", "meridian_effort": "low"}
    assert read(said, by_gateway)[:3] == (*named, "low")
    assert read({TENANT: b"small", SLO_CLASS: b"b\xffd"}, by_gateway)[:2] == ("small", "b\ufffdd")


@pytest.mark.parametrize("extra", [None, {}, {"meridian_tenant": None}])
def test_nothing_said(extra: dict[str, object] | None) -> None:
    assert read(extra) == ("", "", "", None, None, MAX_TOKENS, "", "", None)


# ------------------------------------------------------------------------------------------------- vLLM's own budget

START, END, TEXT = 4, 5, 9
MARKERS = Markers(((START,),), ((END,),))


def params(budget: object, **extra: object) -> SimpleNamespace:
    neutral = {"stop_token_ids": None, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    return SimpleNamespace(thinking_token_budget=budget, extra_args=extra or None, **neutral)


@pytest.mark.parametrize(
    ("budget", "prompt", "cap"),
    [
        (7, [TEXT, TEXT], 7),
        (7, [TEXT, START], 7),
        # vLLM counts the tokens after the start marker.
        (7, [START, TEXT, TEXT], 5),
        (1, [START, TEXT, TEXT], 0),
        (7, [START, TEXT, END, TEXT], 7),
        (7, [START] + [TEXT] * (OPEN_TAIL_TOKENS - 1), 0),
        (2**40, [], MAX_TOKENS),
        (0, [TEXT], 0),
        (None, [START], None),
        # Values that vLLM itself refuses.
        (-1, [TEXT], None),
        (True, [TEXT], None),
        (3.5, [TEXT], None),
    ],
)
def test_a_budget_is_a_cap(budget: object, prompt: list[int], cap: int | None) -> None:
    assert budget_of(params(budget), prompt, MARKERS) == cap


def test_a_budget_without_known_markers_or_without_the_field() -> None:
    assert budget_of(params(7), [START, TEXT], NO_MARKERS) == 7
    assert budget_of(SimpleNamespace(extra_args=None), [START, TEXT], MARKERS) is None


def told(
    sampling_params: Any, connector: Any = None, transfer: Any = None, classes: Sequence[str] = (), lora: str = ""
) -> RequestInfo:
    """Return what the agent reports of a request with these sampling parameters, kv_transfer_params and adapter."""
    request = SimpleNamespace(
        request_id="r",
        lora_request=SimpleNamespace(lora_name=lora) if lora else None,
        sampling_params=sampling_params,
        prompt_token_ids=None,
        num_prompt_tokens=1,
        max_tokens=100,
        trace_headers=None,
        kv_transfer_params=transfer,
    )
    return info_of(request, "m", MARKERS, SimpleNamespace(max_model_len=4096, connector=connector), classes)


@pytest.mark.parametrize(
    ("budget", "own", "cap"), [(7, 9, 7), (9, 7, 7), (9, None, 9), (None, 7, 7), (None, None, None)]
)
def test_of_two_caps_the_smaller_is_the_requests(budget: int | None, own: int | None, cap: int | None) -> None:
    made = params(budget, **({} if own is None else {CAP: own}))
    assert told(made).max_think_tokens == cap


@pytest.mark.parametrize(
    ("connector", "transfer", "remote"),
    [
        (object(), {"do_remote_decode": True, "do_remote_prefill": False}, True),
        (object(), {"do_remote_decode": False, "do_remote_prefill": True}, False),
        (object(), ["do_remote_decode"], False),
        (object(), None, False),
        (None, {"do_remote_decode": True}, False),
    ],
)
def test_another_engine_continues_what_a_connector_keeps_for_it(connector: Any, transfer: Any, remote: bool) -> None:
    """Without a connector vLLM ignores what a client says of KV transfers."""
    assert told(params(None), connector, transfer).remote_decode is remote


@pytest.mark.parametrize(("mark", "candidate"), [(1, True), (0, False), ("1", False), ([1], False), (None, False)])
def test_a_relay_marks_the_requests_that_it_can_continue(mark: object, candidate: bool) -> None:
    own = {} if mark is None else {CANDIDATE: mark}
    assert told(params(None, **own)).hand_over_candidate is candidate


@pytest.mark.parametrize(
    ("name", "value", "candidate"),
    [
        ("stop_token_ids", [TEXT], True),
        ("stop_token_ids", [TEXT, END], False),
        # The engine's generation configuration may name a penalty that the client does not.
        ("presence_penalty", 1.5, False),
        ("frequency_penalty", -0.5, False),
    ],
)
def test_a_request_that_another_engine_would_answer_otherwise_stays(name: str, value: Any, candidate: bool) -> None:
    made = params(None, **{CANDIDATE: 1})
    setattr(made, name, value)
    assert told(made).hand_over_candidate is candidate


@pytest.mark.parametrize(
    ("named", "asked", "classes", "slo_class", "refused"),
    [
        ("standard", None, ["*"], "standard", ""),
        ("standard", "gold", [], "standard", "gold"),
        ("standard", "gold", ["batch", "b*"], "standard", "gold"),
        ("standard", "bulk-2", ["batch", "bulk-*"], "bulk-2", ""),
        ("standard", "gold", ["*"], "gold", ""),
        ("standard", "standard", [], "standard", ""),
        # The gateway names no class, and the client's own counts no more than elsewhere.
        (None, "gold", [], "", "gold"),
        # A glob never matches an empty wish, so a client cannot shed the gateway's class.
        ("standard", "", ["*"], "standard", ""),
    ],
)
def test_a_client_chooses_only_classes_that_the_policy_lets_it_choose(
    named: str | None, asked: str | None, classes: list[str], slo_class: str, refused: str
) -> None:
    said = {name: value for name, value in ((SLO_CLASS, named), (ASKED_SLO_CLASS, asked)) if value is not None}
    info = told(params(None, **said), classes=classes)
    assert (info.slo_class, info.refused_slo_class) == (slo_class, refused)


# -------------------------------------------------------------------------------------------------------- on the wire


@given(
    st.dictionaries(
        st.sampled_from([CAP, TENANT, SLO_CLASS, ASKED_SLO_CLASS, "meridian_effort", FLOOR, ANSWER_ONLY_STOPS]),
        st.one_of(
            st.text(),
            st.text(alphabet="\ud800a"),
            st.integers(),
            st.floats(),
            st.none(),
            st.lists(st.integers()),
        ),
    )
)
def test_whatever_comes_fits_on_the_wire(extra: dict[str, object]) -> None:
    tenant, slo_class, effort, floor, cap, repeated, _, asked, _ = read(extra)
    info = SimpleNamespace(
        request_id="r",
        model="m",
        tenant=tenant,
        slo_class=slo_class,
        prompt_tokens=1,
        max_tokens=1,
        max_think_tokens=cap,
        effort=effort,
        min_think_tokens=floor,
        traceparent="",
        remote_decode=False,
        hand_over_candidate=False,
        handed_over_ref=tenant,
        refused_slo_class=asked,
        chat=False,
        sleeping_stops=False,
    )
    assert 0 <= repeated <= MAX_TOKENS
    message = opened_message((0, info, 1, 0, 0, 0, False, 0, False, False, False, False))
    assert agent_pb2.RequestOpened.FromString(message.SerializeToString()) == message
    assert max(len(tenant), len(slo_class), len(asked), len(effort)) <= MAX_TEXT


@pytest.mark.parametrize("name", [TENANT, SLO_CLASS, "meridian_effort"])
def test_long_names_that_begin_alike_are_different(name: str) -> None:
    begins = "x" * (MAX_TEXT - 1)
    (exact, *longer) = [
        next(text for text in read({name: begins + end})[:3] if text) for end in ("1", "12", "13", "1\x00")
    ]
    assert exact == begins + "1"
    assert len({exact, *longer}) == 4
    assert {len(text) for text in longer} == {MAX_TEXT}
    assert all(next(text for text in read({name: text})[:3] if text) == text for text in longer)


def test_adapters_whose_long_names_begin_alike_are_different() -> None:
    """Overrides, budgets and the counters of tenants match on the name."""
    names = ["x" * MAX_TEXT + end for end in ("", "1", "2")]
    assert len({told(params(None), lora=name).model for name in names}) == len(names)


@pytest.mark.parametrize(
    ("extra", "chat"),
    [({}, False), ({TEMPLATE: "{}"}, True), ({TEMPLATE: UNKNOWN_TEMPLATE}, True), ({CHAT: 1}, True)],
)
def test_a_request_that_was_rendered_from_a_chat_says_so(extra: dict[str, object], chat: bool) -> None:
    assert told(params(None, **extra)).chat is chat


@pytest.mark.parametrize(("value", "stops"), [(0, False), (1, True), (True, True), (1.0, True), (None, None)])
def test_a_request_says_whether_its_stops_end_its_answer_only(value: object, stops: bool | None) -> None:
    assert told(params(None, **{ANSWER_ONLY_STOPS: value})).answer_only_stops is stops
    assert read({ANSWER_ONLY_STOPS: value}).complaint == ""


@pytest.mark.parametrize("value", [2, -1, "1", "yes", [1], {}])
def test_any_other_value_is_ignored(value: object) -> None:
    overrides = read({ANSWER_ONLY_STOPS: value})
    assert overrides.answer_only_stops is None
    assert overrides.complaint.startswith("meridian_answer_only_stops must be 0 or 1; got ")
