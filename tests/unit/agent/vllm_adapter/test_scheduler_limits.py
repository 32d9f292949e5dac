"""Limits of vLLM's scheduler: their bounds, what settings make of them, and the way back to the start-up values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from meridian.v1 import agent_pb2

from meridian_agent.vllm_adapter.required_api import LIMITS
from meridian_agent.vllm_adapter.scheduler_limits import CUTTING, SchedulerLimits, limits_of

RUNNING, TOKENS, PIECE = "max_num_active_seqs", "max_num_scheduled_tokens", "long_prefill_token_threshold"
STOCK = (100, 2048, 0)


class Scheduler:
    """The part of a scheduler that has limits; it counts how often one of them is written."""

    max_num_running_reqs, block_size, max_model_len, need_mamba_block_aligned_split = 128, 16, 8192, False

    def __init__(self, drafts: int = 0, device: str = "cuda", **config: Any) -> None:
        self.written = 0
        self.num_spec_tokens = drafts
        self.requests: dict[str, Any] = {}
        self.max_num_active_reqs, self.max_num_scheduled_tokens, threshold = STOCK
        chosen = {"enable_chunked_prefill": True, "disable_chunked_mm_input": False, PIECE: threshold, **config}
        self.scheduler_config = SimpleNamespace(**chosen)
        self.vllm_config = SimpleNamespace(device_config=SimpleNamespace(device_type=device))
        self.written = 0

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        object.__setattr__(self, "written", self.written + 1 if name != "written" else value)

    def limits(self) -> tuple[int, int, int]:
        return (
            self.max_num_active_reqs,
            self.max_num_scheduled_tokens,
            self.scheduler_config.long_prefill_token_threshold,
        )


def able(scheduler: Any) -> SchedulerLimits:
    """Return the limits of an engine whose vLLM has all that they need."""
    return limits_of(scheduler, lambda _: "")


def settings(**limits: int) -> agent_pb2.Settings:
    return agent_pb2.Settings(engine_limits=agent_pb2.EngineLimitValues(**limits))


def values(limits: agent_pb2.EngineLimitValues) -> tuple[int, int, int]:
    return limits.max_num_active_seqs, limits.max_num_scheduled_tokens, limits.long_prefill_token_threshold


def messages(limits: SchedulerLimits) -> dict[str, agent_pb2.EngineLimit]:
    return {field.name: limit for field, limit in limits.message().ListFields()}


@pytest.mark.parametrize(
    ("name", "drafts", "wanted", "value"),
    [
        # A limit of running requests may be above the start-up value, since the workers have max_num_seqs slots.
        (RUNNING, 0, 1, 1),
        (RUNNING, 0, 120, 120),
        (RUNNING, 0, 129, 128),
        # A step has room for one token, and its drafts, of every slot.
        (TOKENS, 0, 5, 128),
        (TOKENS, 2, 5, 384),
        (TOKENS, 30, 5, 2048),
        (TOKENS, 0, 1000, 1000),
        (TOKENS, 0, 4096, 2048),
        (PIECE, 0, 1, 16),
        (PIECE, 20, 1, 21),
        (PIECE, 0, 100, 100),
        (PIECE, 0, 2**31 - 1, 8192),
    ],
)
def test_values_are_bounded_by_the_start(name: str, drafts: int, wanted: int, value: int) -> None:
    scheduler = Scheduler(drafts)
    limits = able(scheduler)
    limits.obey(settings(**{name: wanted}))
    expected = dict(zip((RUNNING, TOKENS, PIECE), STOCK, strict=True)) | {name: value}
    assert scheduler.limits() == tuple(expected.values())
    assert values(limits.bounded(settings(**{name: wanted}))) == scheduler.limits()
    assert messages(limits)[name].lowest <= value <= messages(limits)[name].highest


def test_nothing_is_written_by_default() -> None:
    scheduler: Any = Scheduler()
    limits = able(scheduler)
    limits.obey(settings())
    limits.freeze(True)
    limits.freeze(False)
    limits.restore()
    assert (scheduler.written, scheduler.limits(), limits.uncut(scheduler)) == (0, STOCK, [])
    # Limits of which the policy says nothing belong to vLLM, whatever their values.
    scheduler.max_num_scheduled_tokens = 32
    limits.obey(settings(**{RUNNING: 5}))
    limits.restore()
    assert scheduler.limits() == (100, 32, 0)


SETTINGS = st.dictionaries(st.sampled_from((RUNNING, TOKENS, PIECE)), st.integers(0, 10_000))


@given(st.lists(SETTINGS | st.booleans() | st.none()))
def test_the_start_up_values_come_back(course: list[dict[str, int] | bool | None]) -> None:
    """Whatever came before: while frozen and after a fault the start-up values hold, and otherwise the newest
    settings, in whatever order settings, freezes and faults come."""
    limits = able(scheduler := Scheduler())
    newest, frozen = settings(), False
    for event in course:
        if event is None:
            limits.restore()
            newest, frozen = settings(), False
        elif isinstance(event, bool):
            limits.freeze(event)
            frozen = event
        else:
            newest = settings(**event)
            limits.obey(newest)
        expected = STOCK if frozen else values(limits.bounded(newest))
        assert scheduler.limits() == expected
    limits.restore()
    assert scheduler.limits() == STOCK


def test_an_engine_refuses_by_name_what_its_vllm_cannot_do() -> None:
    def refusals(scheduler: Any) -> dict[str, str]:
        return {name: limit.refusal for name, limit in messages(able(scheduler)).items()}

    assert set(refusals(Scheduler()).values()) == {""}
    whole, images = Scheduler(enable_chunked_prefill=False), Scheduler(disable_chunked_mm_input=True)
    for scheduler, option in ((whole, "enable_chunked_prefill"), (images, "disable_chunked_mm_input")):
        assert [name for name, why in refusals(scheduler).items() if option in why] == [TOKENS, PIECE]
    hybrid = Scheduler()
    hybrid.need_mamba_block_aligned_split = True
    assert [name for name, why in refusals(hybrid).items() if "KV blocks only" in why] == [TOKENS]
    old: Any = Scheduler()
    del old.max_num_active_reqs
    limits = limits_of(old, lambda name: "vLLM 0.30.0 lacks: x" * (name == RUNNING))
    limits.obey(settings(**{RUNNING: 3, PIECE: 64}))
    assert messages(limits)[RUNNING].refusal == "vLLM 0.30.0 lacks: x"
    assert (old.max_num_running_reqs, old.scheduler_config.long_prefill_token_threshold) == (128, 64)


@pytest.mark.parametrize(
    ("device", "seed", "session", "uncut"),
    [("cpu", 5, False, True), ("cpu", None, True, True), ("cpu", None, False, False), ("cuda", 5, True, False)],
)
def test_a_seeded_prompt_on_a_cpu_is_cut_as_by_stock_vllm(
    device: str, seed: int | None, session: bool, uncut: bool
) -> None:
    """vLLM's CPU runner fails if such a prompt is cut; each of the limits that cut prompts gets its own value back. An
    earlier input of a streaming session may have had a seed."""
    scheduler: Any = Scheduler(device=device)
    limits = able(scheduler)
    params = SimpleNamespace(seed=seed)
    facts: dict[str, Any] = {"sampling_params": params, "num_computed_tokens": 0, "num_tokens": 50}
    scheduler.requests["r"] = SimpleNamespace(**facts, resumable=session)
    limits.obey(settings(**{RUNNING: 2}))
    assert limits.uncut(scheduler) == []
    limits.obey(settings(**{RUNNING: 2, PIECE: 32}))
    expected = [(scheduler.scheduler_config, PIECE, 0)] if uncut else []
    assert limits.uncut(scheduler) == expected
    limits.obey(settings(**{RUNNING: 2, PIECE: 32, TOKENS: 512}))
    assert len(limits.uncut(scheduler)) == 2 * uncut
    scheduler.requests["r"].num_computed_tokens = 49
    assert limits.uncut(scheduler) == []
    limits.freeze(True)
    scheduler.requests["r"].num_computed_tokens = 0
    assert limits.uncut(scheduler) == []


def test_every_field_of_the_policy_is_a_limit_with_a_table() -> None:
    assert set(LIMITS) == set(messages(able(Scheduler()))) == {RUNNING, TOKENS, PIECE} > set(CUTTING)
    assert {field.name for field in agent_pb2.EngineLimitValues.DESCRIPTOR.fields} == set(LIMITS)
