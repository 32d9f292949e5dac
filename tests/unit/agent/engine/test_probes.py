"""Conditions for placing a probe, which never takes what a request needs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from meridian_agent.core.directives import Directives
from meridian_agent.core.live_request import Ending, LiveRequest
from meridian_agent.core.phases import FLAG_SENTENCE, Phase, PhaseState
from meridian_agent.core.probe_admission import STEP_SHARE, Placed, Room, refusal
from meridian_agent.core.request_info import PROBE_PREFIX, RequestInfo
from meridian_agent.core.sentences import NO_SENTENCES
from meridian_agent.core.step_record import MeasuredProbe, Outcome, StepRecord
from meridian_agent.core.step_signals import StepSignals
from meridian_agent.core.tracker import Tracker
from meridian_agent.engine import stock_restore
from meridian_agent.engine.capabilities import EngineFacts, capabilities
from meridian_agent.engine.later_turns import LaterTurns
from meridian_agent.engine.probe_runner import ProbeRunner
from meridian_agent.vllm_adapter import probe_rows, request_api
from meridian_agent.vllm_adapter.scheduler_limits import SchedulerLimits
from meridian_agent.vllm_adapter.tokenizer import Template
from tests.fakes.engine import MARKERS, opened

BLOCK = 16
ROOM = Room(sequences=2, blocks=6, tokens=STEP_SHARE * 20, prefix_caching=True)


def request(**fields: Any) -> SimpleNamespace:
    plain: dict[str, Any] = {
        "status": SimpleNamespace(name="RUNNING"),
        "is_prefill_chunk": False,
        "num_computed_tokens": 40,
        "num_tokens": 41,
        "lora_request": None,
        "mm_features": [],
    }
    return SimpleNamespace(**plain | fields)


def tracked(phase: Phase = Phase.THINK, **fields: Any) -> LiveRequest:
    return LiveRequest(0, RequestInfo("a", "", "", "", 0, 0, None), PhaseState(phase), 0, request(**fields))


def ending() -> LiveRequest:
    live = tracked()
    live.ending = Ending((2,), 1)
    return live


def preempted() -> LiveRequest:
    live = tracked()
    live.preempted = True
    return live


def test_a_probe_that_fits() -> None:
    assert refusal(tracked(), ROOM, BLOCK, 20, 1) == ""
    assert refusal(tracked(), ROOM, BLOCK, 20, 0) == "no room in the context"


@pytest.mark.parametrize(
    ("live", "room", "cost", "reason"),
    [
        (tracked(Phase.OUTPUT), ROOM, 20, "not thinking"),
        (tracked(Phase.PROMPT), ROOM, 20, "not thinking"),
        (ending(), ROOM, 1, "not thinking"),
        (preempted(), ROOM, 1, "not decoding"),
        (tracked(), replace(ROOM, prefix_caching=False), 20, "prefix caching is off"),
        (tracked(num_tokens=65_537), ROOM, 20, "over 65536 tokens"),
        (tracked(lora_request=object()), ROOM, 20, "LoRA request"),
        (tracked(mm_features=[1]), ROOM, 20, "multimodal prompt"),
        (tracked(prompt_embeds=object()), ROOM, 20, "prompt embeddings"),
        (tracked(is_prefill_chunk=True), ROOM, 20, "not decoding"),
        (tracked(num_computed_tokens=0), ROOM, 20, "not decoding"),
        (tracked(status=SimpleNamespace(name="WAITING_FOR_REMOTE_KVS")), ROOM, 20, "not decoding"),
        (tracked(), replace(ROOM, sequences=1), 20, "no running place to spare"),
        (tracked(), replace(ROOM, sequences=0), 20, "no running place to spare"),
        (tracked(), replace(ROOM, blocks=5), 20, "no KV blocks to spare"),
        (tracked(), ROOM, 21, "over the step's probe budget"),
    ],
)
def test_what_is_in_the_way(live: LiveRequest, room: Room, cost: int, reason: str) -> None:
    assert refusal(live, room, BLOCK, cost, 1) == reason


@pytest.mark.parametrize("cost", [1, 15, 16, 17, 100])
def test_at_least_one_free_block_is_left_for_every_block_taken(cost: int) -> None:
    """A probe's tokens span at most ceil(cost / block) + 1 blocks, wherever they begin."""
    spanned = -(-cost // BLOCK) + 1
    roomy = replace(ROOM, tokens=STEP_SHARE * cost)
    fitting = next(n for n in range(100) if not refusal(tracked(), replace(roomy, blocks=n), BLOCK, cost, 1))
    assert fitting >= 2 * spanned


def test_a_result_that_a_request_is_held_for_is_urgent(probing: ProbeRunner) -> None:
    """The result of a probe for which a request is held is sent at once; other results go with later steps."""
    held = tracked()
    measured = StepRecord(step=7, probes=[MeasuredProbe(1, held.slot, 64, 0.5, 2, 1, False, True)])
    probing.sent(measured)
    assert not measured.presses
    probing.held[held] = 0
    probing.sent(StepRecord(step=8))
    assert held.asked_in == 0
    probing.sent(measured)
    assert (held.asked_in, measured.presses) == (7, True)


@pytest.fixture
def probing(monkeypatch: pytest.MonkeyPatch) -> ProbeRunner:
    """Return the probing of an engine without requests, whose probes are ids alone and may be rows anywhere."""
    monkeypatch.setattr(probe_rows, "fits", lambda *_: True)
    monkeypatch.setattr(request_api, "probe_request", lambda _, name, *tokens: SimpleNamespace(request_id=name))
    monkeypatch.setattr(request_api, "aborted_status", lambda: "aborted")
    tracker = Tracker(MARKERS)
    return ProbeRunner(tracker, Directives(tracker), BLOCK, shares_blocks=True)


class FakeScheduler:
    """A scheduler that has room for nothing but probes: `tokens` in a step, and `blocks` that are free."""

    current_step, num_spec_tokens, max_num_running_reqs, max_model_len = 1, 0, 100, 10_000

    def __init__(self, tokens: int, blocks: int, device: str = "cuda") -> None:
        self.max_num_scheduled_tokens = tokens
        self.running: list[Any] = []
        self.requests: dict[str, Any] = {}
        self.vllm_config = SimpleNamespace(device_config=SimpleNamespace(device_type=device))
        self.waiting: Sequence[Any] = []
        pool = SimpleNamespace(get_num_free_blocks=lambda: blocks)
        self.kv_cache_manager = SimpleNamespace(block_pool=pool, enable_caching=True)

    def add_request(self, request: Any) -> None:
        pass

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.running), len(self.waiting)


def scheduler_of(tokens: int, blocks: int, device: str = "cuda") -> Any:
    return FakeScheduler(tokens, blocks, device)


@pytest.mark.parametrize(
    ("tokens", "blocks", "placed"),
    [(10_000, 10_000, 5), (STEP_SHARE * 6, 10_000, 3), (10_000, 3 * 4, 3)],
)
def test_the_probes_of_a_step_share_its_room(tokens: int, blocks: int, placed: int, probing: ProbeRunner) -> None:
    """Each probe computes two tokens, for which it may take two blocks."""
    for n in range(5):
        probing._directives.probes.put_back((n + 1, tracked(all_token_ids=[9] * 41), 0, 0))
    assert probing.place(scheduler_of(tokens, blocks), observes=True) == [2] * placed
    assert [outcome[0] for outcome in probing._tracker.record.outcomes] == [4, 5][: 5 - placed]


def test_a_probe_is_the_first_that_waits_and_moves_no_other_request(probing: ProbeRunner) -> None:
    scheduler = scheduler_of(10_000, 10_000)
    prompts = [SimpleNamespace(num_computed_tokens=0, num_tokens=10, request_id=name) for name in "ab"]
    scheduler.waiting = deque(prompts)
    scheduler.add_request = scheduler.waiting.append
    probing._directives.probes.put_back((1, tracked(all_token_ids=[9] * 41), 0, 0))
    assert probing.place(scheduler, observes=True) == [2]
    assert [request.request_id for request in scheduler.waiting] == [*probing.placed, "a", "b"]


@pytest.mark.parametrize(
    ("device", "prompt_tokens", "full", "may"),
    [
        ("cpu", 9_990, False, False),
        ("cuda", 9_990, False, True),
        # There is room for the prompt and the probe.
        ("cpu", 9_900, False, True),
        # The prompt is not admitted.
        ("cpu", 9_990, True, True),
    ],
)
def test_no_probe_takes_a_token_of_a_seeded_prompt_on_a_cpu(
    device: str, prompt_tokens: int, full: bool, may: bool, probing: ProbeRunner
) -> None:
    """vLLM would compute such a prompt in pieces, and then rewind a generator that cannot be rewound."""
    probes, scheduler = probing._directives.probes, scheduler_of(10_000, 100, device)
    params = SimpleNamespace(seed=1)
    prompt = SimpleNamespace(sampling_params=params, num_computed_tokens=0, num_tokens=prompt_tokens)
    scheduler.waiting = [prompt]
    if full:
        scheduler.running = [tracked().ref] * scheduler.max_num_running_reqs
    live = tracked(all_token_ids=[9] * 41, request_id="a")
    probing.rows_possible = True
    probes.put_back((1, live, FLAG_SENTENCE, 0))
    assert probing.place_rows(scheduler, {live: 0}) == may
    assert (len(probing.rows), len(probes)) == (may, not may)
    if not full:
        probing.rows_possible = False
        probes.put_back((2, live, 0, 0))
        assert probing.place(scheduler, observes=True) == [2] * may
        assert len(probes) == (not may), "the probe waits"


def test_where_no_probe_can_be_hidden_each_is_refused_with_the_reason() -> None:
    """The agent refuses a probe with the reason, even if it has told the control plane that the engine cannot probe."""
    tracker = Tracker(MARKERS)
    directives = Directives(tracker)
    probing = ProbeRunner(tracker, directives, BLOCK, True, never="HiSparseConnector moves the KV of every request")
    directives.probes.put_back((1, tracked(all_token_ids=[9] * 41), 0, 0))
    assert probing.place(scheduler_of(10_000, 10_000), observes=True) == []
    ((_, outcome, _, detail, _),) = tracker.record.outcomes
    assert (outcome, detail) == (Outcome.REFUSED, "HiSparseConnector moves the KV of every request")
    cache = SimpleNamespace(kv_cache_groups=[0])
    config = SimpleNamespace(device_config=SimpleNamespace(device_type="cpu"))
    scheduler = SimpleNamespace(
        kv_cache_manager=SimpleNamespace(enable_caching=True), kv_cache_config=cache, vllm_config=config
    )
    limits = SchedulerLimits({})
    later_turns = LaterTurns(lambda _: Template(), lambda: None)
    facts = [
        EngineFacts("m", NO_SENTENCES, True, later_turns, lambda *_: None, ("cpu", ""), limits, why)
        for why in ("", "it moves it")
    ]
    assert [capabilities(scheduler, True, one).eat_probe for one in facts] == [True, False]


def test_no_client_is_told_of_a_probe_that_is_withdrawn(probing: ProbeRunner) -> None:
    """With several engines vLLM tells each client which of its requests have ended; a probe must not be among them."""
    ended: dict[int, set[str]] = {0: {"a"}}
    scheduler: Any = SimpleNamespace(
        finished_req_ids_dict=ended, finish_requests=lambda request_id, _: ended[0].add(request_id)
    )
    probing.placed["meridian-probe:1"] = Placed(1, tracked(), 7, 40)
    probing.scheduled(scheduler, {"a": 1})
    assert (probing.placed, ended) == ({}, {0: {"a"}})


@pytest.mark.usefixtures("probing")
def test_a_fault_takes_out_probes_only() -> None:
    """A client chooses its request's id, to which vLLM appends something, and may choose one that looks like a
    probe's."""
    chosen = [f"{PROBE_PREFIX}1", f"{PROBE_PREFIX}x", "meridian-probe"]
    clients = [f"{each}{more}" for each in chosen for more in ("_0-1a2b3c4d", "-12345678", "_0")]
    ended: list[str] = []
    scheduler: Any = SimpleNamespace(
        requests=dict.fromkeys([*clients, f"{PROBE_PREFIX}12"]),
        finish_requests=lambda request_id, _: ended.append(request_id),
    )
    outputs = [SimpleNamespace(request_id=each) for each in scheduler.requests]
    group: Any = SimpleNamespace(outputs=outputs, finished_requests=set(scheduler.requests))
    stock_restore.take_out_probes(scheduler)
    stock_restore.hide_probes([group])
    assert ended == [f"{PROBE_PREFIX}12"]
    assert ([each.request_id for each in group.outputs], group.finished_requests) == (clients, set(clients))


def test_the_end_of_probing_leaves_no_probe_and_holds_nobody(probing: ProbeRunner) -> None:
    """A freeze and the end of a lease withdraw every probe, and each decision has its one outcome."""
    taken_out: list[str] = []
    scheduler: Any = SimpleNamespace(
        finished_req_ids_dict=None, finish_requests=lambda request_id, _: taken_out.append(request_id), current_step=1
    )
    tracker = probing._tracker
    waiting, computed = (opened(tracker, name, ref=request()) for name in ("a", "b"))
    probing.placed["meridian-probe:1"] = Placed(1, waiting, 7, 40)
    probing.placed["meridian-probe:2"] = Placed(2, computed, 7, 40, cost_tokens=2)
    probing.held[waiting] = probing.held[computed] = 5
    probing.keep_places(scheduler)
    probing.end(scheduler)
    assert (probing.placed, probing.held) == ({}, {})
    assert sorted(taken_out) == ["meridian-probe:1", "meridian-probe:2"]
    outcomes = [(outcome[0], outcome[1]) for outcome in tracker.record.outcomes]
    assert outcomes == [(1, Outcome.AGENT_OFF), (2, Outcome.AGENT_OFF)]
    probing.end(scheduler)
    assert len(tracker.record.outcomes) == 2


@pytest.mark.parametrize(("tokens", "measured"), [([], 1.0), ([5], np.nan)], ids=["no token", "no finite logits"])
def test_a_probe_without_a_result_is_refused(tokens: list[int], measured: float, probing: ProbeRunner) -> None:
    """vLLM may end a probe with an error, for example, and that is no fault. Its likeliest token is no trial answer,
    and its request does not wait for a decision from it."""
    tracker = probing._tracker
    live = opened(tracker, "a", ref=request())
    probing.placed["meridian-probe:1"] = Placed(1, live, 7, 40)
    probing.held[live] = 0
    group: Any = SimpleNamespace(
        outputs=[SimpleNamespace(request_id="meridian-probe:1", new_token_ids=tokens)], finished_requests=None
    )
    probing.collect(group, StepSignals(None, *np.full((4, 1), measured)), {"meridian-probe:1": 0})
    assert (probing.placed, group.outputs) == ({}, [])
    assert (tracker.record.probes, live.same_answer, probing.held) == ([], 0, {})
    assert [(outcome[0], outcome[1]) for outcome in tracker.record.outcomes] == [(1, Outcome.REFUSED)]
