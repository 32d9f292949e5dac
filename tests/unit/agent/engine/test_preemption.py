"""Which requests the agent preempts for waiting ones, when, and within which limits."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from meridian.v1 import agent_pb2

from meridian_agent.core.directives import PREEMPTS, Directives
from meridian_agent.core.live_request import Ending, LiveRequest
from meridian_agent.core.phases import Phase, PhaseState
from meridian_agent.core.preempts import JOINED
from meridian_agent.core.request_info import RequestInfo
from meridian_agent.core.step_record import Outcome
from meridian_agent.core.tracker import Tracker
from meridian_agent.engine.preemption import MOST_LACKING, Preemption
from tests.fakes.engine import MARKERS

BLOCK = 16
Told = list[tuple[int, int, int, str]]


class Request:
    """vLLM's request, as far as the agent uses it."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__ |= fields


class Queue(deque[Any]):
    """vLLM's FCFS queue, as far as the agent uses it."""

    def __contains__(self, request: object) -> bool:
        raise AssertionError("a look at each request of the queue, which takes long for each one that may preempt")

    def remove_requests(self, requests: list[Any]) -> None:
        kept = [request for request in self if request not in set(requests)]
        self.clear()
        self.extend(kept)

    def prepend_request(self, request: Any) -> None:
        self.appendleft(request)


@dataclass(eq=False)
class Scheduler:
    """vLLM's scheduler, as far as the agent uses it: places, blocks, and its own method of preemption."""

    places: int = 2
    free: int = 100
    caching: bool = True
    running: list[Any] = field(default_factory=list)
    waiting: Queue = field(default_factory=Queue)

    def __post_init__(self) -> None:
        self.max_num_running_reqs, self.block_size, self.num_spec_tokens = self.places, BLOCK, 0
        self.num_waiting_for_streaming_input, self.requires_kv_delivery = 0, False
        self.prev_step_scheduled_req_ids: set[str] = set()
        self.vllm_config = SimpleNamespace(device_config=SimpleNamespace(device_type="cpu"))
        self.policy, self.lora_config = "fcfs", None
        self.kv_cache_manager = SimpleNamespace(
            watermark_blocks=0,
            enable_caching=self.caching,
            block_pool=SimpleNamespace(get_num_free_blocks=lambda: self.free),
            coordinator=SimpleNamespace(single_type_managers=[SimpleNamespace(block_size=BLOCK)]),
            enable_kv_cache_events=True,
            get_computed_blocks=self.look_up,
            get_blocks=lambda name: SimpleNamespace(blocks=[self.named(name).blocks]),
        )
        self.looks = 0

    def look_up(self, request: Any) -> tuple[Any, int, int]:
        # vLLM would send a KV event for each look at a request that asks for them.
        assert not self.kv_cache_manager.enable_kv_cache_events
        self.looks += 1
        return SimpleNamespace(blocks=[[]]), request.cached, 0

    def named(self, name: str) -> Any:
        return next(request for request in (*self.running, *self.waiting) if request.request_id == name)

    def _preempt_request(self, request: Any, timestamp: float, drop_stale_output: bool) -> None:
        assert request not in self.running
        request.status, request.num_computed_tokens = SimpleNamespace(name="PREEMPTED"), 0
        request.num_preemptions += 1
        self.free += len(request.blocks)
        self.waiting.prepend_request(request)


class Engine:
    """An engine with thinking requests in all places, and one request that waits."""

    def __init__(self, **fields: Any) -> None:
        self.tracker, self.scheduler, self.now_s = Tracker(MARKERS), Scheduler(**fields), 0.0
        self.directives = Directives(self.tracker)
        queues = SimpleNamespace(ordered=False, preempted_answers=lambda: self.answers)
        self.answers: list[Any] = []
        self.preemption = Preemption(
            self.tracker,
            self.directives.preempts,
            queues,  # type: ignore[arg-type]
            lambda: self.now_s,
            lambda _: 0,
        )

    def add(self, name: str, computed: int = 100, phase: Phase = Phase.THINK, **fields: Any) -> LiveRequest:
        """Add a request that runs, or waits if nothing of it is computed."""
        queue: Any = self.scheduler.running if computed else self.scheduler.waiting
        block = SimpleNamespace(ref_cnt=1)
        request: Any = Request(
            **{
                "request_id": name,
                "status": SimpleNamespace(name="RUNNING" if computed else "WAITING"),
                "num_computed_tokens": computed,
                "num_tokens": computed + 1 if computed else 20,
                "num_preemptions": 0,
                "sampling_params": SimpleNamespace(seed=None),
                "lora_request": None,
                "structured_output_request": None,
                "cached": 0,
                "blocks": [block] * -(-computed // BLOCK),
                **fields,
            }
        )
        queue.append(request)
        info = RequestInfo(name, "", "", "", 0, 0, None)
        return self.tracker.enter(info, PhaseState(phase, think_tokens=50), 0, request)

    def decide(self, waiting: str = "w", victims: str = "ab", **fields: Any) -> None:
        slots = {name: live.slot for name, live in self.tracker.by_id.items()}
        limits = {"max_preemptions": 3, "recomputed_tokens_per_s": 1000, "max_wait_ms": 1000}
        made = agent_pb2.Preempt(
            decision_id=1 + slots[waiting], slot=slots[waiting], victims=[slots[n] for n in victims], **limits | fields
        )
        self.directives.accept(agent_pb2.Directives(step=1000, preempts=[made]))

    def obey(self) -> list[str]:
        """Return the names of the waiting queue after the agent has looked."""
        self.preemption.obey(self.scheduler)  # type: ignore[arg-type]
        return [request.request_id for request in self.scheduler.waiting]

    @property
    def told(self) -> Told:
        return [outcome[:4] for outcome in self.tracker.record.outcomes]


def crowded(a: dict[str, Any] | None = None, b: dict[str, Any] | None = None, **fields: Any) -> Engine:
    engine = Engine(**fields)
    engine.add("a", **{"computed": 100, **(a or {})})
    engine.add("b", **{"computed": 99, **(b or {})})
    engine.add("w", 0, Phase.PROMPT)
    return engine


# a has 100 computed tokens, 4 of them past its last full block, and b has 99, so 3.
WHO: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], str]] = [
    ("fewest tokens outside of the prefix cache", {}, {}, {}, "b"),
    ("fewer, though more are computed", {"computed": 160}, {}, {}, "a"),
    ("without a prefix cache, fewest computed tokens", {"computed": 160}, {}, {"caching": False}, "b"),
    ("of equal ones the one preempted less often", {"num_preemptions": 1}, {"computed": 100}, {}, "b"),
    ("none in its answer", {}, {"phase": Phase.OUTPUT}, {}, "a"),
    ("none that does not run", {}, {"status": SimpleNamespace(name="PREEMPTED")}, {}, "a"),
    ("none that was preempted too often", {}, {"num_preemptions": 3}, {}, "a"),
    ("none that a CPU would sample differently", {}, {"sampling_params": SimpleNamespace(seed=1)}, {}, "a"),
    ("no streaming session", {}, {"resumable": True}, {}, "a"),
]


@pytest.mark.parametrize(("a", "b", "fields", "victim"), [row[1:] for row in WHO], ids=[row[0] for row in WHO])
def test_the_request_that_loses_least(
    a: dict[str, Any], b: dict[str, Any], fields: dict[str, Any], victim: str
) -> None:
    engine = crowded(a, b, **fields)
    engine.decide()
    assert engine.obey() == ["w", victim]
    ((_, outcome, _, detail),) = engine.told
    assert outcome == Outcome.APPLIED
    assert detail.startswith(f"preempted {victim}: ")
    ((decision_id, slot, _),) = engine.tracker.record.preemptions
    assert (decision_id, slot) == (3, engine.tracker.by_id[victim].slot)


def ending(engine: Engine) -> None:
    for name in "ab":
        engine.tracker.by_id[name].ending = Ending((2,), 1)


NOBODY: list[tuple[str, dict[str, Any], Any]] = [
    ("nobody of those that may be preempted", {"victims": "w"}, None),
    ("all are about to answer", {}, ending),
    ("a preempted answer comes first", {}, lambda engine: engine.answers.append(1)),
    ("fewer may run than can be preempted", {}, lambda e: setattr(e.scheduler, "max_num_running_reqs", -1)),
    ("more blocks are needed than there are", {}, lambda engine: setattr(engine.scheduler, "free", -100)),
]


@pytest.mark.parametrize(("claim", "change"), [row[1:] for row in NOBODY], ids=[row[0] for row in NOBODY])
def test_nobody_is_preempted(claim: dict[str, Any], change: Any) -> None:
    engine = crowded()
    engine.decide(**claim)
    if change is not None:
        change(engine)
    assert engine.obey() == ["w"]
    assert engine.told == []


def test_a_free_place_is_enough() -> None:
    engine = crowded(places=3)
    other = engine.add("x", 0, Phase.PROMPT)
    engine.scheduler.waiting.rotate()
    assert engine.scheduler.waiting[0] is other.ref
    engine.decide()
    assert engine.obey() == ["w", "x"]
    assert engine.told == []
    engine.tracker.by_id["w"].ref.status = SimpleNamespace(name="RUNNING")
    engine.obey()
    assert [(outcome, detail) for _, outcome, _, detail in engine.told] == [(Outcome.ENDED_NATURALLY, JOINED)]


@pytest.mark.parametrize(
    ("status", "grammar", "ready"),
    [
        ("WAITING", None, True),
        ("WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR", None, False),
        ("WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR", object(), True),
        ("WAITING_FOR_REMOTE_KVS", None, False),
    ],
)
@pytest.mark.parametrize("pause", ["UNPAUSED", "PAUSED_NEW"])
def test_a_request_that_waits_for_something_else(status: str, grammar: object, ready: bool, pause: str) -> None:
    engine = crowded()
    request: Any = engine.tracker.by_id["w"].ref
    request.status = SimpleNamespace(name=status)
    request.structured_output_request = SimpleNamespace(grammar=grammar)
    setattr(engine.scheduler, "pause_state", SimpleNamespace(name=pause))  # noqa: B010
    engine.decide()
    engine.obey()
    assert [outcome for _, outcome, *_ in engine.told] == [Outcome.APPLIED] * (ready and pause == "UNPAUSED")


def test_nobody_is_preempted_for_an_adapter_that_does_not_fit() -> None:
    """To find out whether all adapters fit takes a look at all requests, so that it happens once a step."""
    engine, looks = crowded(), list[int]()

    def requests() -> list[Any]:
        looks.append(1)
        return [*engine.scheduler.running, *engine.scheduler.waiting]

    setattr(engine.scheduler, "lora_config", SimpleNamespace(max_loras=1))  # noqa: B010
    setattr(engine.scheduler, "requests", SimpleNamespace(values=requests))  # noqa: B010
    for number, name in enumerate("xyz"):
        engine.add(name, 0, Phase.PROMPT, lora_request=SimpleNamespace(lora_int_id=number))
        engine.decide(name)
    assert engine.obey() == ["w", "x", "y", "z"]
    engine.decide("w")
    assert engine.obey() == ["w", "b", "x", "y", "z"]
    assert len(looks) == 2


def test_as_many_as_the_blocks_need() -> None:
    # The prompt needs 10 blocks, of which 1 is free and b and a have 7 each.
    engine = crowded(places=8, free=1)
    engine.tracker.by_id["w"].ref.num_tokens = 160
    engine.decide()
    assert engine.obey() == ["w", "a", "b"]
    ((*_, detail),) = engine.told
    # Of the 9 blocks that are lacking each may lose all of its own.
    assert detail == "preempted b: 99 tokens to compute again; a: 100 tokens to compute again"


class Unseen:
    """A block of a prompt that other requests share, at which no step need look."""

    @property
    def ref_cnt(self) -> int:
        raise AssertionError("a look at a shared prompt, which takes long")


@pytest.mark.parametrize(("free", "preempted"), [(4, {"a", "b"}), (3, set[str]())])
def test_no_look_at_a_long_shared_prompt(free: int, preempted: set[str]) -> None:
    """The prompt needs 10 blocks, and a and b have 3 of their own each."""
    blocks = [Unseen()] * 50 + [SimpleNamespace(ref_cnt=2)] + [SimpleNamespace(ref_cnt=1)] * 3
    engine = crowded({"blocks": blocks}, {"blocks": blocks}, places=8, free=free)
    engine.tracker.by_id["w"].ref.num_tokens = 160
    engine.decide()
    assert set(engine.obey()) == {"w", *preempted}


@pytest.mark.parametrize(("places", "queue"), [(2, ["w", "v", "a", "b"]), (3, ["v", "w", "b"])])
def test_no_preempted_request_goes_before_those_that_wait(places: int, queue: list[str]) -> None:
    """Two requests wait: both preempt another one, or one of them gets a free place."""
    engine = crowded(places=places)
    engine.add("v", 0, Phase.PROMPT)
    engine.decide("w")
    engine.decide("v")
    assert engine.obey() == queue


@pytest.mark.parametrize(
    ("places", "may_grow", "looks"), [(2, False, 0), (2, True, MOST_LACKING + 1), (12, True, 10 + MOST_LACKING + 1)]
)
def test_a_step_looks_at_few_of_many_waiting_requests(places: int, may_grow: bool, looks: int) -> None:
    """Two requests run. Those that wait take the free places in one step, and few others are looked at."""
    engine = crowded(places=places)
    for name in map(str, range(30)):
        engine.add(name, 0, Phase.PROMPT)
        engine.decide(name, max_preemptions=0)
    engine.preemption.recomputed.expect(0 if may_grow else 2, 1)
    assert sorted(engine.obey()) == sorted(["w", *map(str, range(30))])
    assert engine.scheduler.looks == looks
    assert engine.scheduler.kv_cache_manager.enable_kv_cache_events


def test_requests_that_lack_too_much_take_no_turn_of_others() -> None:
    engine = crowded()
    for name in map(str, range(MOST_LACKING)):
        engine.add(name, 0, Phase.PROMPT)
        engine.decide(name, max_preemptions=0)
    engine.add("small", 0, Phase.PROMPT)
    engine.decide("small")
    engine.obey()
    assert not engine.told
    assert engine.obey()[0] == "small"
    assert [outcome for _, outcome, *_ in engine.told] == [Outcome.APPLIED]


def test_a_prompt_that_is_too_long() -> None:
    engine = crowded()
    engine.tracker.by_id["w"].ref.num_tokens = 500
    engine.decide(max_prompt_tokens=400)
    engine.obey()
    ((_, outcome, _, detail),) = engine.told
    assert (outcome, detail) == (Outcome.REFUSED, "500 prompt tokens are not cached, and max_prompt_tokens is 400")
    # The next turn of a conversation has most of its prompt in the prefix cache.
    setattr(engine.tracker.by_id["w"].ref, "cached", 112)  # noqa: B010
    engine.decide(max_prompt_tokens=400)
    assert engine.obey() == ["w", "b"]


def test_a_request_that_is_named_twice_is_preempted_once() -> None:
    engine = crowded(places=0)
    engine.decide(victims="aab" + "b" * 5_000)
    ((live, claim),) = engine.directives.preempts.claims.items()
    assert [victim.info.request_id for victim in claim.victims] == ["a", "b"]
    assert engine.obey() == ["w"]
    engine.scheduler.max_num_running_reqs = 2
    assert engine.obey() == ["w", "b"]
    assert live.ref is engine.scheduler.waiting[0]


def test_shadow_preempts_nothing() -> None:
    engine = crowded()
    engine.add("x", 0, Phase.PROMPT)
    engine.scheduler.waiting.rotate()
    engine.decide(shadow=True)
    assert engine.obey() == ["x", "w"]
    assert engine.told == [(3, Outcome.SHADOWED, 50, "would preempt b: 3 tokens to compute again")]
    assert len(engine.scheduler.running) == 2


def test_shadow_for_many_requests() -> None:
    """A decision in shadow ends with the look at its request, which then has no turn to lose in the same step."""
    engine, names = crowded(), [*map(str, range(MOST_LACKING + 1))]
    for name in names:
        engine.add(name, 0, Phase.PROMPT)
        engine.decide(name, shadow=True)
    for told in (MOST_LACKING, MOST_LACKING + 1):
        assert engine.obey() == ["w", *names]
        assert [outcome for _, outcome, *_ in engine.told] == [Outcome.SHADOWED] * told


@pytest.mark.parametrize(("places", "tokens", "queue"), [(3, 160, ["w", "x"]), (2, 288, ["w", "b", "x"])])
def test_shadow_changes_nothing_for_others(places: int, tokens: int, queue: list[str]) -> None:
    """x would take the free place, or preempt both requests for its blocks and leave a place to w."""
    engine = crowded(places=places, free=10)
    engine.add("x", 0, Phase.PROMPT, num_tokens=tokens)
    engine.scheduler.waiting.rotate()
    engine.decide("x", shadow=True)
    engine.decide("w")
    assert engine.obey() == queue


@pytest.mark.parametrize("places", [2, 3])
def test_many_in_shadow_take_no_turn_of_others(places: int) -> None:
    """Those in shadow find no victims. w preempts b, or takes the free place."""
    engine = crowded(places=places)
    for name in map(str, range(30)):
        engine.add(name, 0, Phase.PROMPT, num_tokens=2_000)
        engine.decide(name, max_preemptions=0, shadow=True)
    engine.scheduler.waiting.rotate(-1)
    engine.decide("w")
    assert engine.obey()[0] == "w"
    assert engine.scheduler.looks == MOST_LACKING + 2


def test_what_is_computed_again_is_limited_per_second() -> None:
    """The second preemption waits until the tokens that the first one computed again are worth a second."""
    engine = crowded()
    engine.decide(recomputed_tokens_per_s=10)
    assert engine.obey() == ["w", "b"]
    scheduler, b = engine.scheduler, engine.tracker.by_id["b"].ref
    # The blocks of b were reused meanwhile, so all of its 99 tokens are computed again.
    scheduler.waiting.clear()
    scheduler.running = [engine.tracker.by_id["a"].ref, b]
    b.status, b.num_computed_tokens = SimpleNamespace(name="RUNNING"), 100
    engine.preemption.scheduled(SimpleNamespace(num_scheduled_tokens={"b": 100, "w": 20}))
    assert engine.preemption.recomputed.total == 99
    engine.add("v", 0, Phase.PROMPT)
    for now_s, preempts in ((0.0, False), (8.0, False), (9.5, True)):
        engine.now_s = now_s
        engine.decide("v", "a", recomputed_tokens_per_s=10)
        assert (engine.obey() == ["v", "a"]) is preempts, now_s


def test_a_preempted_request_comes_first_after_a_while() -> None:
    """While it waits for too long, no other request goes before it, and none is preempted."""
    engine = crowded(places=1)
    engine.scheduler.running.pop(0)
    engine.decide(victims="b")
    assert engine.obey() == ["w", "b"]
    engine.scheduler.waiting.popleft()
    c = engine.add("c", 50)
    engine.add("v", 0, Phase.PROMPT)
    for now_s, queue in ((0.9, ["v", "b"]), (1.0, ["b", "v"])):
        engine.now_s = now_s
        engine.decide("v", "")
        engine.decide("v", "c", shadow=now_s < 1)
        engine.scheduler.waiting = Queue([engine.tracker.by_id["v"].ref, engine.tracker.by_id["b"].ref])
        assert engine.obey() == queue
    assert c.ref in engine.scheduler.running


def test_each_decision_has_one_outcome() -> None:
    engine = crowded()
    engine.directives.preempts.refusal = "no"
    engine.decide()
    engine.directives.preempts.refusal = ""
    engine.decide()
    engine.decide()
    engine.decide(victims="")
    engine.decide()
    engine.directives.drop(PREEMPTS)
    engine.decide()
    engine.directives.close(engine.tracker.by_id["w"])
    assert [outcome for _, outcome, *_ in engine.told] == [
        Outcome.REFUSED,
        Outcome.SUPERSEDED,
        Outcome.SUPERSEDED,
        Outcome.APPLIED,
        Outcome.AGENT_OFF,
        Outcome.REQUEST_GONE,
    ]
