"""Order, victims, share and reclaimed blocks on the real scheduler and block pool."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from meridian_agent.core.directives import DispatchPlan
from meridian_agent.core.step_record import StepRecord
from meridian_agent.vllm_adapter.scheduler_api import admission_limit_name
from meridian_agent.vllm_adapter.tokenizer import Template
from tests.data import maze
from tests.engine import ENGINE_ARGS, STRIPPED, Run, cases, chat, paced, prompt_ids, stops_next
from tests.engine.pacing import Settled, waits
from tests.engine.policies import DENSE, NEUTRAL
from tests.engine.test_decisions import endless, opened
from tests.processes import Control, wait_for

ANSWER = {"enable_thinking": False}


BLOCKS: int = ENGINE_ARGS["num_gpu_blocks_override"]


@contextlib.contextmanager
def half_the_cache(llm: Any, held_blocks: int = BLOCKS // 2) -> Iterator[None]:
    """Hold half of the engine's blocks, or so many, so that shorter requests fill the others."""
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    held = pool.get_new_blocks(held_blocks)
    try:
        yield
    finally:
        pool.free_blocks(held)


def pressure(llm: Any, agent: Any, control: Control, settled: Settled | None = None) -> tuple[int, int]:
    """Run thinkers first and answers last, more than the cache holds; return preemptions of (thinking, answering).

    With `settled`, each step waits until the reports before it are answered.
    """
    before = agent.preempted_think, agent.output_critical
    run = Run(llm)
    for i in range(5):
        run.add(f"think-{i}", opened(i), endless(agent, max_tokens=100))
    for i in range(3):
        run.add(f"answer-{i}", {**cases()[i], "template": ANSWER}, endless(agent, max_tokens=65))
    with half_the_cache(llm, BLOCKS * 3 // 4):
        run.until(settled=settled)
    assert {len(t) for n, t in run.tokens.items() if n.startswith("answer")} == {65}
    assert {len(t) for n, t in run.tokens.items() if n.startswith("think")} == {100}
    control.settled()
    return agent.preempted_think - before[0], agent.output_critical - before[1]


def test_answers_are_never_preempted_before_thinking(llm: Any, agent: Any, control: Control) -> None:
    """Stock vLLM preempts the answers that came last; governed, it preempts only thinking."""
    control.apply({**NEUTRAL, "scheduler": {"enabled": False}})
    thinking, answering = pressure(llm, agent, control)
    assert answering > 0, (thinking, answering)
    control.apply(NEUTRAL)
    thinking, answering = pressure(llm, agent, control)
    assert thinking > 0
    assert answering == 0


def test_preempted_thinking_resumes_with_its_counts(llm: Any, agent: Any, control: Control) -> None:
    """A cap counts across preemption and resumption."""
    control.apply({"scheduler": {"max_think_tokens": 150}, "entropy": {"enabled": False}})
    before = agent.preempted_think
    run = Run(llm)
    for i in range(6):
        run.add(f"r{i}", opened(i), endless(agent, max_tokens=180))
    with half_the_cache(llm):
        run.until()
    assert agent.preempted_think > before
    end = agent.tracker.markers.end[0]
    assert {t.index(end) for t in run.tokens.values()} == {150}


def order_of(scheduler: Any, agent: Any) -> list[int]:
    return [int(agent.tracker.by_id[r.request_id].state.phase) for r in scheduler.running]


def test_running_order_puts_answers_first(llm: Any, agent: Any, scheduler: Any, settled: Settled) -> None:
    run = Run(llm)
    for i in range(3):
        run.add(f"think-{i}", opened(i), endless(agent))
    run.add("answer", {**cases()[0], "template": ANSWER}, endless(agent))
    run.until(lambda: len(run.tokens["answer"]) > 20, settled=settled)
    assert order_of(scheduler, agent) == [3, 2, 2, 2]
    for name in run.tokens:
        run.abort(name)
    run.until()


SEVEN = [opened(i) for i in range(6)] + [{**cases()[0], "template": ANSWER}]
# Milliseconds of a step, and of each token in it, as the agent of `priced` reports them.
STEP_MS, TOKEN_MS = 5.0, 1.0


def tell(patch: pytest.MonkeyPatch, agent: Any, step_time_ms: Callable[[int, int], float]) -> None:
    """Let the agent report other times of its steps. step_time_ms: from a step's rows and its prompt tokens."""
    outbox = agent.link.outbox
    send = type(outbox).send

    def priced(record: StepRecord, snapshot: Any) -> None:
        record.step_time_ms = step_time_ms(len(record.slots), record.prefill_tokens)
        send(outbox, record, snapshot)

    patch.setattr(outbox, "send", priced)
    patch.setattr(outbox, "send_text", lambda _: False)


@pytest.fixture
def priced(agent: Any, llm: Any, control: Control, settled: Settled, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the agent, which reports steps as slow as a larger model's, after the control plane has learnt their cost.

    The reports go over a new stream, because the control plane would remember the earlier steps for hundreds of steps.
    """
    tell(monkeypatch, agent, lambda rows, _: STEP_MS + TOKEN_MS * rows)
    before = control.engine().connect_time
    agent.link.restart()
    wait_for(lambda: agent.link.lease.connected and control.engine().connect_time != before, 20, "a stream of its own")
    wait_for(lambda: control.engine().acked_revision == agent.link.lease.revision, 20, "the policy to be acknowledged")
    for count in (3, 7):
        chat(llm, SEVEN[:count], endless(agent, max_tokens=50))
    settled()
    return agent


def test_share_leaves_thinkers_out_and_starves_none(llm: Any, priced: Any, control: Control, settled: Settled) -> None:
    """With steps over the answers' budget, one thinker in six joins a step, in turns; tokens stay the same."""
    params = [endless(priced, max_tokens=90)] * 6 + [endless(priced, max_tokens=60)]
    reference = chat(llm, SEVEN, params)
    before = priced.queues.think_skips
    tight = {"output_tpot_budget_ms": 7.5, "think_batch_multiplier": 1.0, "think_tpot_budget_ms": 10_000.0}
    control.apply({**NEUTRAL, "scheduler": {**NEUTRAL["scheduler"], **tight}})
    run = Run(llm)
    for i, (case, param) in enumerate(zip(SEVEN, params, strict=True)):
        run.add(f"r{i}", case, param)
    run.until(lambda: "r6" in run.finished, settled=settled)
    skipped = priced.queues.think_skips - before
    lengths = [len(run.tokens[f"r{i}"]) for i in range(6)]
    assert skipped > 100
    assert max(lengths) - min(lengths) <= 20
    assert min(lengths) > 0
    run.until()
    assert [run.tokens[f"r{i}"] for i in range(7)] == reference
    control.settled()


def test_thinking_alone_is_never_left_out(llm: Any, priced: Any, control: Control, settled: Settled) -> None:
    """Before the first answer, the share costs thinking nothing."""
    tight = {"output_tpot_budget_ms": 5.5, "think_batch_multiplier": 1.0, "think_tpot_budget_ms": 10_000.0}
    control.apply({**NEUTRAL, "scheduler": {**NEUTRAL["scheduler"], **tight}})
    before = priced.queues.think_skips
    paced(llm, SEVEN[:6], endless(priced, max_tokens=80), settled)
    assert priced.directives.active_plan().think_per_step is not None
    assert priced.queues.think_skips == before


@pytest.mark.parametrize("budget_ms", [6.0, 10_000.0])
def test_think_tpot_budget_bounds_the_wait(
    llm: Any, priced: Any, control: Control, settled: Settled, budget_ms: float
) -> None:
    """A budget below the step time allows no skip at all."""
    tight = {"output_tpot_budget_ms": 7.5, "think_batch_multiplier": 1.0, "think_tpot_budget_ms": budget_ms}
    control.apply({**NEUTRAL, "scheduler": {**NEUTRAL["scheduler"], **tight}})
    before = priced.queues.think_skips
    paced(llm, SEVEN, endless(priced, max_tokens=80), settled)
    assert (priced.queues.think_skips > before) == (budget_ms > STEP_MS + TOKEN_MS)


def test_strategies_change_live_and_change_no_token(llm: Any, priced: Any, control: Control, settled: Settled) -> None:
    """Every strategy runs in turn on a running engine: different requests are left out, but the tokens stay the
    same."""
    params = endless(priced, max_tokens=130)
    reference = chat(llm, SEVEN, params)
    run = Run(llm)
    for i, case in enumerate(SEVEN):
        run.add(f"r{i}", case, params)
    seen = {}

    def has_come(before: DispatchPlan | None) -> bool:
        return priced.directives.plan is not before or waits(priced, "plan")

    for strategy in ("output_first", "deadline", "reasoning_first", "stock"):
        limits = {"output_tpot_budget_ms": 7.5, "think_batch_multiplier": 1.0, "strategy": strategy}
        if strategy == "reasoning_first":
            limits["output_tpot_budget_ms"] = 40.0
        revision = control.set_policy({**NEUTRAL, "scheduler": {**NEUTRAL["scheduler"], **limits}})
        wait_for(lambda: priced.link.mailbox.arrived, 20, "the settings to arrive")
        before = priced.directives.plan
        run.step()
        assert priced.link.lease.revision == revision
        wait_for(partial(has_come, before), 20, "the plan to arrive")
        done = len(run.tokens["r6"])
        run.until(lambda done=done: len(run.tokens["r6"]) > done + 20, settled=settled)
        plan = priced.directives.plan
        seen[strategy] = plan.think_per_step is not None, plan.output_per_step is not None, plan.stock
    assert seen == {
        "output_first": (True, False, False),
        "deadline": (True, False, False),
        "reasoning_first": (False, True, False),
        "stock": (False, False, True),
    }
    run.until()
    assert [run.tokens[f"r{i}"] for i in range(7)] == reference
    control.settled()


def test_prompts_wait_while_answers_stream(
    llm: Any, priced: Any, control: Control, settled: Settled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of 150 tokens comes in over several steps beside an answer, and in one step without one."""
    least = {"output_tpot_budget_ms": 1.0, "min_prefill_tokens": 16}
    for count in (3, 7):
        chat(llm, SEVEN[:count], endless(priced, max_tokens=20))
    with monkeypatch.context() as patch:
        tell(patch, priced, lambda _, prefill_tokens: STEP_MS + 0.5 * prefill_tokens)
        for seed in range(3):
            chat(llm, [long_prompt(seed)], endless(priced, max_tokens=40))
        settled()
        control.apply({**NEUTRAL, "scheduler": {**NEUTRAL["scheduler"], **least}})
        run, chunks = Run(llm), {True: 0, False: 0}
        for answers in (True, False):
            if answers:
                run.add("answer", SEVEN[-1], endless(priced, max_tokens=80))
                run.until(lambda: len(run.tokens["answer"]) > 20, settled=settled)
            name = f"prompt-{answers}"
            run.add(name, long_prompt(10 + answers), endless(priced, max_tokens=8))
            while not run.tokens[name]:
                run.step()
                settled()
                chunks[answers] += 1
            run.until()
    assert chunks[False] <= 2
    assert chunks[True] >= 5
    control.settled()


def long_prompt(seed: int) -> dict[str, Any]:
    """Return a prompt that no cache holds."""
    return {"prompt": "\n".join(maze.prompts(6, seed=1000 + seed)), "template": {"open_think": True}}


@pytest.mark.parametrize("fraction", [0.01, 1.0])
def test_think_phase_memory_fraction_holds_admission(  # noqa: PLR0917
    llm: Any, agent: Any, control: Control, scheduler: Any, settled: Settled, fraction: float
) -> None:
    """In vLLM's own order answers are preempted; while they wait and thinking has its share, no request is admitted."""
    control.apply({"scheduler": {"enabled": False}, "kv_memory": {"think_phase_memory_fraction": fraction}})
    limits: list[int] = []
    before_schedule = agent.before_schedule

    def watched(*args: Any) -> Any:
        found = before_schedule(*args)
        limits.extend(limit.value for limit in found if limit.name == admission_limit_name(scheduler))
        return found

    agent.before_schedule = watched
    try:
        # One step alone is held, and on an engine that does not wait its decision may come too late.
        pressure(llm, agent, control, settled if fraction < 1.0 else None)
    finally:
        del agent.before_schedule
    assert bool(limits) == (fraction < 1.0)


def cached(scheduler: Any, blocks: list[int]) -> list[bool]:
    pool = scheduler.kv_cache_manager.block_pool.blocks
    return [pool[b].block_hash is not None for b in blocks]


@pytest.mark.parametrize(
    ("enabled", "tool_call", "reclaimed"),
    [(True, None, True), (False, None, False), (True, ".", False), (True, "<think>", True)],
    ids=["on", "off", "in a tool loop", "no tool call in the output"],
)
def test_unreachable_blocks_go_first(  # noqa: PLR0917
    llm: Any,
    agent: Any,
    control: Control,
    scheduler: Any,
    settled: Settled,
    monkeypatch: pytest.MonkeyPatch,
    enabled: bool,
    tool_call: str | None,
    reclaimed: bool,
) -> None:
    """Blocks past the prompt lose their hash and head the free queue; the prompt's blocks stay cached.

    With the policy off, all blocks stay cached. Blocks also stay if the output calls a tool (in this test, any sentence
    end does), because the next turn repeats it.
    """
    llm.llm_engine.reset_prefix_cache()
    calls = llm.get_tokenizer().convert_tokens_to_ids(tool_call) if tool_call else None
    monkeypatch.setitem(agent.facts.later_turns._templates, "{}", Template(True, calls))
    control.apply({**NEUTRAL, "kv_memory": {"enabled": enabled}})
    run = Run(llm)
    run.add("r", opened(), endless(agent, max_tokens=60, extra_args=STRIPPED))
    run.until(lambda: len(run.tokens["r"]) == 59, settled=settled)
    (name,) = agent.tracker.by_id
    (blocks,) = scheduler.kv_cache_manager.get_block_ids(name)
    prompt_blocks = len(prompt_ids(llm, opened())) // agent.block_size
    assert prompt_blocks >= 1
    stops_next(scheduler, name)
    run.until()
    full = blocks[: (len(prompt_ids(llm, opened())) + 59) // agent.block_size]
    kept = cached(scheduler, full)
    assert all(kept[:prompt_blocks])
    assert all(kept[prompt_blocks:]) != reclaimed
    assert any(kept[prompt_blocks:]) != reclaimed
    control.settled()


@pytest.mark.usefixtures("probe_requests")
def test_a_probe_under_way_keeps_no_unreachable_block(
    llm: Any, agent: Any, control: Control, scheduler: Any, settled: Settled
) -> None:
    """A request ends in the step that computes its probe. The probe still shares the request's blocks then.

    The request is short, because a request has at most 64 probes.
    """
    llm.llm_engine.reset_prefix_cache()
    control.apply(DENSE)
    run = Run(llm)
    run.add("r", opened(), endless(agent, max_tokens=60, extra_args=STRIPPED))
    run.until(lambda: len(run.tokens["r"]) == 59, settled=settled)
    (name,) = agent.tracker.by_id
    (blocks,) = scheduler.kv_cache_manager.get_block_ids(name)
    prompt_blocks = len(prompt_ids(llm, opened())) // agent.block_size
    probed, freeing = [], agent.blocks.freeing
    stops_next(scheduler, name)

    def watched(scheduler: Any, request: Any, live: Any, probes: Any) -> None:
        probed.extend(probes)
        freeing(scheduler, request, live, probes)

    agent.blocks.freeing = watched
    try:
        run.until()
    finally:
        del agent.blocks.freeing
    assert probed
    full = blocks[: (len(prompt_ids(llm, opened())) + 59) // agent.block_size]
    assert len(full) > prompt_blocks
    assert not any(cached(scheduler, full)[prompt_blocks:])
    control.settled()
