"""Engines of many kinds, governed over vLLM's own scheduler: with adapters, whole images, hybrid and diffusion models,
streaming sessions and captured outputs. The agent breaks none of them."""

from __future__ import annotations

import copy
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from meridian.v1 import agent_pb2
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from meridian_agent.core import tracker
from meridian_agent.core.phases import Phase
from meridian_agent.core.step_record import StepRecord
from meridian_agent.engine import scheduler_mixin, stock_restore
from meridian_agent.link.control_stream import ControlStream
from meridian_agent.vllm_adapter import request_api
from tests.processes import BUSY
from tests.sim import engine as engine_module
from tests.sim.engine import BLOCK, CONTEXT, Engine, Script, Shape, config_of, share_tokenizer, words

START, END, _, TEXT = words()
THINKS, ANSWERS = Script(1, 10**6, 10, False), Script(2, 1, 10**6, False)
PROMPT_TOKENS = 4
CAPTURE = "the workers capture auxiliary outputs (enable_return_routed_experts)"


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let no control plane answer, and no settings be kept from another run."""
    monkeypatch.setenv("MERIDIAN_CONTROL", "127.0.0.1:1")
    monkeypatch.setenv("MERIDIAN_STATE_DIR", str(tmp_path))
    share_tokenizer(monkeypatch)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    """A function that makes a governed engine; the options change its configuration before it starts."""
    engines: list[Engine] = []

    def make(shape: Shape, **sections: dict[str, Any]) -> Engine:
        config, structured = config_of(shape)
        config = copy.copy(config)
        for section, options in sections.items():
            changed = copy.copy(getattr(config, section))
            vars(changed).update(options)
            setattr(config, section, changed)
        monkeypatch.setattr(engine_module, "config_of", lambda _: (config, structured))
        engines.append(Engine(shape, lambda *_: None))
        return engines[-1]

    yield make
    for engine in engines:
        engine.scheduler.shutdown()


def add(engine: Engine, request_id: str, prompt: list[int], script: Script, max_tokens: int = 60, **kinds: Any) -> None:
    engine.open(request_id, prompt, replace(script, max_tokens=max_tokens), {}, **kinds)


def answer(engine: Engine, request_id: str) -> None:
    add(engine, request_id, [START, END, *TEXT[:2]], ANSWERS)


def step(engine: Engine, times: int) -> None:
    for _ in range(times):
        engine.step(lambda: None, lambda: None)
        assert engine.agent is not None


def obey(engine: Engine, plan: agent_pb2.DispatchPlan) -> None:
    plan.decision_id = 1
    directives = agent_pb2.Directives(step=10**6, plan=plan)
    engine.agent.directives.accept(directives)
    engine.agent.calm.end()


@pytest.mark.parametrize("is_async", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("adapters", [1, 2])
def test_a_step_never_admits_one_adapter_too_many(made: Callable[..., Engine], is_async: bool, adapters: int) -> None:
    """While a second adapter waits for the only place, the first one's requests are in every step; with two places they
    are left out as often as the plan says."""
    engine = made(Shape(is_async=is_async, blocks=200, places=8, batch_tokens=128))
    engine.scheduler.lora_config = SimpleNamespace(max_loras=adapters)
    first, second = (LoRARequest(name, number, f"/{name}") for number, name in enumerate("ab", 1))
    answer(engine, "answer")
    for name in ("first", "another"):
        add(engine, name, [TEXT[0], START], THINKS, lora_request=first)
    step(engine, 4)
    obey(engine, agent_pb2.DispatchPlan(think_per_step=0, max_skip_steps=3))
    add(engine, "second", [TEXT[2], START], THINKS, lora_request=second)
    step(engine, 200)
    assert set(engine.finished) == {"answer", "first", "another", "second"}
    together = sum("first" in members and "second" in members for members in engine.schedule)
    assert (together > 0, engine.agent.queues.think_skips > 0) == (adapters == 2, adapters == 2)


@pytest.mark.parametrize("is_async", [False, True], ids=["synchronous", "asynchronous"])
def test_a_hold_on_admission_keeps_nobody_out_unless_a_preempted_answer_waits(
    made: Callable[..., Engine], is_async: bool
) -> None:
    """Requests whose prompt has closed thinking wait as answers, but only an admission helps them."""
    engine = made(Shape(is_async=is_async, blocks=64, places=2))
    for name in ("first", "second"):
        add(engine, name, [TEXT[0], START], THINKS, 20)
    step(engine, 4)
    for number in range(3):
        add(engine, f"waits {number}", [TEXT[0], START, END], ANSWERS, 5)
    obey(engine, agent_pb2.DispatchPlan(hold_admission=True))
    step(engine, 40)
    assert len(engine.finished) == 5


def test_a_reset_of_the_prefix_cache_is_no_sign_of_short_memory(
    made: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM preempts all running requests for it."""
    engine = made(Shape(blocks=200, places=8, batch_tokens=128))
    answer(engine, "answer")
    add(engine, "thinks", [TEXT[0], START], THINKS)
    step(engine, 4)
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    step(engine, 200)
    assert set(engine.finished) == {"answer", "thinks"}
    assert (engine.agent.preempted_think, engine.agent.output_critical) == (0, 0)
    assert "was preempted" not in caplog.text


def test_preempted_answers_wait_before_thinking_that_was_preempted_between_them(made: Callable[..., Engine]) -> None:
    engine = made(Shape(blocks=200, places=8, batch_tokens=128))
    for name in ("first", "second"):
        answer(engine, name)
    add(engine, "thinks", [TEXT[0], START], THINKS)
    step(engine, 4)
    scheduler = engine.scheduler
    for name in ("second", "thinks", "first"):
        scheduler.running.remove(scheduler.requests[name])
        scheduler._preempt_request(scheduler.requests[name], 0.0)
    assert [request.request_id for request in scheduler.waiting] == ["first", "thinks", "second"]
    engine.agent.queues.obey(scheduler, agent_pb2.DispatchPlan())
    assert [request.request_id for request in scheduler.waiting][2] == "thinks"
    step(engine, 100)
    assert len(engine.finished) == 3


@pytest.mark.parametrize("is_async", [False, True], ids=["synchronous", "asynchronous"])
def test_a_share_leaves_nobody_out_while_no_answer_streams(made: Callable[..., Engine], is_async: bool) -> None:
    """An answer that waits for a place gets none the sooner for it."""
    engine = made(Shape(is_async=is_async, blocks=200, places=4, batch_tokens=128))
    for number in range(4):
        add(engine, f"thinks {number}", [TEXT[0], START], THINKS, 40 + 10 * (number > 0))
    step(engine, 4)
    answer(engine, "waits")
    obey(engine, agent_pb2.DispatchPlan(think_per_step=1, max_skip_steps=8, prefill_tokens_per_step=1))
    while "thinks 0" not in engine.finished:
        step(engine, 1)
    assert engine.agent.queues.think_skips == 0
    while "waits" not in engine.finished:
        step(engine, 1)
    assert engine.agent.queues.think_skips > 0


@pytest.mark.parametrize(("is_async", "drafts"), [(False, 0), (True, 0), (False, 2)])
def test_prompts_take_no_tokens_of_thinking_that_is_left_out(
    made: Callable[..., Engine], is_async: bool, drafts: int
) -> None:
    """Nor those of drafts that the drafter has not made, except for the first piece of a prompt."""
    engine = made(Shape(is_async=is_async, drafts=drafts, blocks=900, places=64, batch_tokens=512))
    engine.scheduler.update_draft_token_ids = lambda _: None
    answer(engine, "answer")
    for number in range(20):
        add(engine, f"thinks {number}", [TEXT[0], START], THINKS)
    step(engine, 4)
    obey(engine, agent_pb2.DispatchPlan(think_per_step=1, max_skip_steps=50, prefill_tokens_per_step=8))
    add(engine, "new", [TEXT[1]] * 40, THINKS, 5)
    step(engine, 8)
    assert engine.agent.queues.think_skips > 0
    pieces = [members["new"] for members in engine.schedule if "new" in members]
    assert pieces[:4] == ([8] * 4 if not drafts else [pieces[0], 8, 8, 8])


@pytest.mark.parametrize(("policy", "first"), [("fcfs", "new"), ("priority", "thinks")])
def test_a_prompt_in_pieces_is_preempted_before_thinking_unless_vllm_goes_by_priority(
    made: Callable[..., Engine], policy: str, first: str
) -> None:
    engine = made(Shape(blocks=24, places=8, batch_tokens=128, policy=policy))
    answer(engine, "answer")
    for number in range(3):
        add(engine, f"thinks {number}", [TEXT[0], START], THINKS)
    step(engine, 4)
    obey(engine, agent_pb2.DispatchPlan(max_skip_steps=3, prefill_tokens_per_step=2))
    add(engine, "new", [TEXT[1]] * 80, THINKS, 5)
    while not (preempted := [r.request_id for r in engine.scheduler.requests.values() if r.num_preemptions]):
        step(engine, 1)
    assert [name.partition(" ")[0] for name in preempted] == [first]
    step(engine, 200)
    assert len(engine.finished) == 5


def test_a_rank_changes_no_priority_for_good(made: Callable[..., Engine]) -> None:
    """A rank is a fraction, which a float has no room for beside a priority such as a time in nanoseconds."""
    engine = made(Shape(blocks=200, places=8, batch_tokens=128, policy="priority"))
    priorities = [0, -3, 2**43 - 1, 2**43, 1 - 2**43, 1_764_137_000_123_456, 1_764_137_000_123_456_789, 10**400]
    for number, priority in enumerate(priorities):
        add(engine, str(number), [TEXT[0], START], replace(THINKS, priority=priority), 60)
    step(engine, 2)
    requests = [engine.scheduler.requests[str(number)] for number in range(len(priorities))]
    for rank in (1000, 3, 1000):
        slots = [live.slot for live in engine.agent.tracker.by_id.values()]
        obey(engine, agent_pb2.DispatchPlan(slot=slots, rank=[rank] * len(slots)))
        step(engine, 2)
        assert [request.priority != own for request, own in zip(requests, priorities, strict=True)] == [
            abs(own) < 2**43 for own in priorities
        ]
    assert sorted(range(len(requests)), key=lambda n: requests[n].priority) == sorted(
        range(len(requests)), key=priorities.__getitem__
    )
    stock_restore.order(engine.scheduler)
    assert [request.priority for request in requests] == priorities


def test_a_session_that_waits_for_input_gets_its_priority_back(made: Callable[..., Engine]) -> None:
    """vLLM keeps such a session in a queue of its own."""
    engine = made(Shape(blocks=200, places=8, batch_tokens=128, policy="priority"))
    add(engine, "session", [TEXT[0], START], replace(THINKS, priority=1), 6, resumable=True)
    step(engine, 2)
    request, (live,) = engine.scheduler.requests["session"], engine.agent.tracker.by_id.values()
    obey(engine, agent_pb2.DispatchPlan(slot=[live.slot], rank=[200], max_skip_steps=3))
    while request.status is not RequestStatus.WAITING_FOR_STREAMING_REQ:
        step(engine, 1)
    engine.agent.queues.undo(engine.scheduler)
    assert request.priority == 1


@pytest.mark.parametrize("whole", [False, True])
def test_a_plan_cuts_no_image_that_must_stay_whole(made: Callable[..., Engine], whole: bool) -> None:
    shape, image = Shape(blocks=200, places=8, batch_tokens=128), PlaceholderRange(offset=PROMPT_TOKENS, length=32)
    engine = made(shape, scheduler_config={"disable_chunked_mm_input": whole})
    engine.scheduler.max_num_encoder_input_tokens = 1000
    engine.scheduler.encoder_cache_manager = EncoderCacheManager(1000)
    answer(engine, "answer")
    step(engine, 3)
    obey(engine, agent_pb2.DispatchPlan(prefill_tokens_per_step=16))
    prompt = [TEXT[0]] * PROMPT_TOKENS + [TEXT[1]] * 32 + [TEXT[2]] * PROMPT_TOKENS
    feature = MultiModalFeatureSpec(data=None, modality="image", identifier="image", mm_position=image)
    add(engine, "image", prompt, THINKS, 5, mm_features=[feature])
    step(engine, 8)
    pieces = [members["image"] for members in engine.schedule if "image" in members]
    assert (pieces[0] == len(prompt)) == whole


def test_a_plan_leaves_room_for_a_block_of_a_hybrid_models_prompt(
    made: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM cuts such a prompt at the ends of blocks, so a prompt would wait for as long as answers stream."""

    def hybrid(blocks: int, *_: object) -> KVCacheConfig:
        attention = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        page = {"mamba_cache_mode": "align", "page_size_padded": attention.page_size_bytes}
        mamba = MambaSpec(block_size=BLOCK, shapes=((1,),), dtypes=(torch.float32,), **page)
        return KVCacheConfig(blocks, [], [KVCacheGroupSpec(["a"], attention), KVCacheGroupSpec(["m"], mamba)])

    monkeypatch.setattr(engine_module, "KVCacheConfig", hybrid)
    shape = Shape(blocks=900, places=64, batch_tokens=512)
    engine = made(shape, cache_config={"mamba_cache_mode": "align", "mamba_block_size": BLOCK})
    assert engine.scheduler.need_mamba_block_aligned_split
    for number in range(20):
        answer(engine, f"answer {number}")
    step(engine, 3)
    obey(engine, agent_pb2.DispatchPlan(prefill_tokens_per_step=2))
    add(engine, "new", [TEXT[1]] * 40, THINKS, 5)
    step(engine, 8)
    assert [members["new"] for members in engine.schedule if "new" in members][:2] == [BLOCK, BLOCK]


@pytest.mark.parametrize("captures", [False, True])
def test_workers_that_capture_outputs_compute_no_probe(
    made: Callable[..., Engine], captures: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """They fail on a request that begins in the middle of a KV block."""
    engine = made(Shape(), aux_output_config={"enable_return_routed_experts": captures})
    assert engine.agent.facts.no_probes == (CAPTURE if captures else "")
    assert (f"no EAT probes: {CAPTURE}" in caplog.text) == captures


@pytest.mark.parametrize("by_rust", [False, True])
def test_without_the_agent_in_the_front_end_no_client_names_its_tenant(
    made: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, by_rust: bool, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MERIDIAN_TENANT_FROM", "header:x-tenant")
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", str(int(by_rust)))
    engine = made(Shape())
    engine.open("r", [START], THINKS, {"meridian_tenant": "rich", "meridian_slo_class": "gold"})
    info = engine.agent.tracker.by_id["r"].info
    assert (info.tenant, info.slo_class) == ("", "")
    assert ("front end (VLLM_USE_RUST_FRONTEND is set): chats count as completions" in caplog.text) == by_rust


def test_steps_whose_requests_have_ended_are_reported(
    made: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ControlStream, "start", lambda _: None)
    engine = made(Shape(places=2, blocks=200, is_async=True))
    engine.agent.lease.found()
    answer(engine, "answer")
    step(engine, 3)
    newest = engine.agent.tracker.newest
    engine.step(lambda: engine.abort("answer"), lambda: None)
    step(engine, 1)
    # The end, and the two steps that had begun before.
    assert engine.agent.tracker.newest == newest + 3


def test_steps_of_a_pooling_model_are_reported_now_and_then(
    made: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No request generates text, so a report has nothing but the numbers of requests, which change with each step."""
    monkeypatch.setattr(ControlStream, "start", lambda _: None)
    engine, now = made(Shape(places=2, blocks=200)), [0.0]
    monkeypatch.setattr(lease := engine.agent.lease, "clock", lambda: now[0])
    lease.found()

    def pooled(output: Any, _: Any) -> ModelRunnerOutput:
        ids = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(ids, {r: i for i, r in enumerate(ids)}, [], pooler_output=[torch.zeros(1)] * len(ids))

    monkeypatch.setattr(engine, "_sample", pooled)
    prompt, names = [START] * PROMPT_TOKENS, [f"r{number}" for number in range(17)]
    for name in names:
        engine.model.tokens[name] = engine.sent[name] = prompt
        engine.scheduler.add_request(Request(name, prompt, None, PoolingParams(task="embed"), arrival_time=0.0))
    for _ in range(9):
        now[0] += 0.03
        step(engine, 1)
    assert engine.finished.keys() == {*names}
    # A report every 0.1 s, and one of the step after which no request waits.
    ring = engine.agent.link.outbox.ring
    sent = [ring.get_nowait() for _ in range(ring.qsize())]
    assert [(record.gauges or ())[1:] for record in sent if isinstance(record, StepRecord)] == [(0, 15), (0, 7), (0, 0)]


@pytest.mark.parametrize(("ranks", "data_parallel", "governed"), [(2, 1, False), (4, 2, False), (2, 2, True)])
def test_ranks_that_must_decide_the_same_run_as_stock(
    made: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, ranks: int, data_parallel: int, governed: bool
) -> None:
    """torchrun starts a scheduler for each rank of a model; a decision would reach one of them a step earlier."""
    told: list[str] = []
    monkeypatch.setattr(scheduler_mixin, "say_absent", lambda reason, _: told.append(reason))
    sizes = {"world_size": ranks, "data_parallel_size": data_parallel}
    engine = made(Shape(), parallel_config={"distributed_executor_backend": "external_launcher", **sizes})
    assert (engine.agent is not None, bool(told)) == (governed, not governed)


def test_an_engine_with_a_diffusion_model_runs_as_stock(
    made: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A canvas of tokens is no draft that the agent may drop, and has one row less than the agent's masks."""
    told: list[str] = []
    monkeypatch.setattr(scheduler_mixin, "say_absent", lambda reason, _: told.append(reason))
    engine = made(Shape(), model_config={"is_diffusion": True})
    assert (told, engine.agent) == (["the model is a diffusion model"], None)
    # The simulator's model samples single tokens.
    engine.scheduler.num_sampled_tokens_per_step = 1
    answer(engine, "answer")
    while engine.busy():
        engine.step(lambda: None, lambda: None)
    assert set(engine.finished) == {"answer"}


def test_an_engine_without_the_agent_leaves_nothing_behind(made: Callable[..., Engine]) -> None:
    """A program may build further engines, beside which an engine that is gone would stay in the fleet."""
    before = {*threading.enumerate()}
    engine = made(Shape(), model_config={"is_diffusion": True})
    (stream,) = (one for one in {*threading.enumerate()} - before if one.name == "meridian-link")
    name = engine.scheduler.engine_name.name
    engine.scheduler.shutdown()
    stream.join(10 * BUSY)
    assert not stream.is_alive()
    assert made(Shape()).scheduler.engine_name.name == name


@pytest.mark.parametrize("is_async", [False, True], ids=["synchronous", "asynchronous"])
def test_each_input_of_a_session_is_a_request_of_its_own(made: Callable[..., Engine], is_async: bool) -> None:
    """vLLM keeps one request for all inputs of a streaming session, and for as long as the session waits for more. It
    ends the session when a last input comes under the session's id, for which it keeps no request."""
    engine = made(Shape(is_async=is_async, blocks=200))
    live, phases = engine.agent.tracker.by_id, list[Phase]()

    def answered() -> None:
        while engine.scheduler.requests["session"].status is not RequestStatus.WAITING_FOR_STREAMING_REQ:
            step(engine, 1)
            phases.extend(one.phase for one in live.values())
        step(engine, 3)
        assert (list(live), engine.agent.lease.idle) == ([], True)

    add(engine, "session", [TEXT[0], START], THINKS, 4, resumable=True)
    request = engine.scheduler.requests["session"]
    assert live["session"].phase is Phase.THINK
    answered()
    assert set(phases) == {Phase.THINK}
    # Two inputs at once: vLLM begins the second one while it processes the end of the first one.
    for prompt in ([TEXT[1], START, END], [TEXT[1], START]):
        add(engine, "session", prompt, THINKS, 4, resumable=True)
    assert (live["session"].ref is request, live["session"].phase) == (True, Phase.OUTPUT)
    phases.clear()
    answered()
    assert phases[0] is Phase.OUTPUT
    assert phases[-1] is Phase.THINK
    add(engine, "session", [TEXT[0]], THINKS, 4)
    assert (engine.live, list(live)) == ([], [])
    step(engine, 2)
    assert engine.agent.lease.idle


@pytest.mark.parametrize("is_async", [False, True], ids=["synchronous", "asynchronous"])
def test_a_tier_of_a_sessions_input_ends_with_the_input(made: Callable[..., Engine], is_async: bool) -> None:
    """The session keeps its KV blocks for the next input, however the session ends."""
    engine, told = made(Shape(is_async=is_async, blocks=200)), list[Any]()
    tracker, take_record = engine.agent.tracker, engine.agent.tracker.take_record

    def taken() -> Any:
        record = take_record()
        told.extend(record.outcomes)
        return record

    tracker.take_record = taken
    for number in range(1, 4):
        add(engine, "session", [TEXT[0], START], THINKS, 4, resumable=True)
        step(engine, 2)
        slot, unreachable = tracker.by_id["session"].slot, agent_pb2.EVICTION_TIER_UNREACHABLE
        tier = agent_pb2.TierChange(decision_id=number, slot=slot, tier=unreachable)
        engine.agent.directives.accept(agent_pb2.Directives(step=10**6, tiers=[tier]))
        if number < 3:
            while engine.scheduler.requests["session"].status is not RequestStatus.WAITING_FOR_STREAMING_REQ:
                step(engine, 1)
    engine.abort("session")
    step(engine, 3)
    why = "the streaming session keeps its blocks"
    refused = agent_pb2.OUTCOME_REFUSED
    assert [(number, outcome, detail) for number, outcome, _, detail, _ in told[:2]] == [
        (1, refused, why),
        (2, refused, why),
    ]
    cut = "the answer was cut: a later request may go on with it"
    assert [(number, outcome, detail) for number, outcome, _, detail, _ in told[2:]] == [(3, refused, cut)]
    assert (tracker.unfreed, tracker.by_id) == ({}, {})


@pytest.mark.parametrize("is_async", [False, True], ids=["synchronous", "asynchronous"])
def test_no_probe_is_longer_than_the_context(made: Callable[..., Engine], is_async: bool) -> None:
    """vLLM's worker fails if a request generates a token past the context, and with it the engine."""
    engine, longest, told = made(Shape(is_async=is_async, blocks=200, places=64, batch_tokens=512)), 0, list[Any]()
    agent, schedule = engine.agent, engine._schedule
    agent.observe_entropy, report = True, agent.directives.report

    def watched() -> Any:
        nonlocal longest
        output = schedule()
        probes = [engine.scheduler.requests[name] for name in engine.probes if name in engine.scheduler.requests]
        longest = max([longest, *(probe.num_tokens + probe.max_tokens for probe in probes)])
        return output

    def reported(*outcome: Any, **more: Any) -> None:
        told.append((outcome[1], more.get("detail", outcome[3] if len(outcome) > 3 else "")))
        report(*outcome, **more)

    engine._schedule, agent.directives.report = watched, reported  # type: ignore[method-assign]
    add(engine, "parent", [TEXT[0], START], THINKS, CONTEXT)
    number = 0
    while "parent" in agent.tracker.by_id:
        number += 1
        probe = agent_pb2.EatProbe(slot=agent.tracker.by_id["parent"].slot, decision_id=number)
        agent.directives.accept(agent_pb2.Directives(step=10**6, probes=[probe]))
        agent.calm.end()
        step(engine, 1)
    assert engine.finished == {"parent": "length"}
    assert longest == CONTEXT
    assert (agent_pb2.OUTCOME_REFUSED, "no room in the context") in told


@pytest.mark.parametrize("tokens", range(20, 34))
def test_a_probe_has_the_hashes_of_its_own_tokens(made: Callable[..., Engine], tokens: int) -> None:
    """The request that is probed may have gone on, and its newer blocks have other tokens than the probe's."""
    engine = made(Shape(blocks=200))
    add(engine, "parent", [TEXT[0], START], THINKS, 60)
    parent = engine.scheduler.requests["parent"]
    while parent.num_tokens < tokens:
        step(engine, 1)
    for shared in range(12, parent.num_tokens + 1):
        own = [*parent.all_token_ids[:shared], *TEXT[:4], END, *TEXT[:4]]
        probe = request_api.probe_request(parent, "probe", own, shared)
        fresh = Request("fresh", own, SamplingParams(max_tokens=1), None, block_hasher=parent._block_hasher)
        assert probe.block_hashes == fresh.block_hashes


def test_a_probe_ends_with_all_requests_before_an_engine_sleeps(
    made: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM drops the output of a probe that is under way then, so the probe would count as placed for ever."""
    engine = made(Shape(is_async=True, blocks=200, places=64, batch_tokens=512))
    add(engine, "parent", [TEXT[0], START], THINKS, 90)
    step(engine, 6)
    agent = engine.agent
    agent.observe_entropy = True
    probe = agent_pb2.EatProbe(slot=agent.tracker.by_id["parent"].slot, decision_id=7)
    agent.directives.accept(agent_pb2.Directives(step=10**6, probes=[probe]))
    agent.calm.end()
    while not any(placed.cost_tokens for placed in agent.probing.placed.values()):
        step(engine, 1)
    sent: list[Any] = []
    monkeypatch.setattr(agent.link.outbox, "send", lambda record, _: sent.append(record))
    engine.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    assert agent.probing.placed == {}
    assert [outcome[:2] for record in sent for outcome in record.outcomes] == [(7, agent_pb2.OUTCOME_REQUEST_GONE)]
    while engine.busy():
        step(engine, 1)


@pytest.mark.parametrize("is_async", [False, True], ids=["synchronous", "asynchronous"])
def test_more_requests_than_a_control_plane_takes_in_wait_for_slots(
    made: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    """The oldest requests, which run first, have slots; the others get theirs before they run."""
    monkeypatch.setattr(tracker, "MAX_SLOTS", 16)
    engine = made(Shape(is_async=is_async, blocks=200, places=3, batch_tokens=128))
    names = [f"request {number}" for number in range(60)]
    for name in names:
        add(engine, name, [TEXT[0], START], Script(1, 2, 2, False), 8)
    slots: dict[str, int] = {}
    while engine.busy():
        slots |= {name: live.slot for name, live in engine.agent.tracker.by_id.items()}
        assert {request.request_id for request in engine.scheduler.running} <= slots.keys()
        step(engine, 1)
    assert set(engine.finished) == slots.keys() == set(names)
    assert max(slots.values()) == 15
    assert not engine.scheduler._guard.fault
