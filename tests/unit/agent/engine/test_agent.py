"""The engine's thread and the link's thread act at the same time, at the places where the two meet."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from meridian.v1 import agent_pb2
from vllm import SamplingParams

from meridian_agent.core.directives import CAPS, ORDER
from meridian_agent.core.phases import NO_MARKERS, Phase, begin
from meridian_agent.core.request_info import RequestInfo
from meridian_agent.core.sentences import NO_SENTENCES
from meridian_agent.core.step_record import COUNTERS, Outcome
from meridian_agent.core.step_signals import OF_THE_START, REQUEST
from meridian_agent.engine.agent import Agent
from meridian_agent.engine.capabilities import EngineFacts
from meridian_agent.engine.later_turns import LaterTurns
from meridian_agent.link.control_stream import ControlStream
from meridian_agent.link.message_sizes import SnapshotRecord
from meridian_agent.vllm_adapter import scheduler_api
from meridian_agent.vllm_adapter.scheduler_limits import SchedulerLimits
from meridian_agent.vllm_adapter.tokenizer import Template
from tests.fakes.engine import END, MARKERS, START, TEXT, opened


def scheduler_of() -> Any:
    model = SimpleNamespace(get_vocab_size=lambda: 100)
    config = SimpleNamespace(model_config=model, device_config=SimpleNamespace(device_type="cpu"))
    return SimpleNamespace(
        block_size=16,
        num_spec_tokens=0,
        policy="fcfs",
        running=[],
        scheduler_config=SimpleNamespace(enable_chunked_prefill=True, disable_chunked_mm_input=False),
        vllm_config=config,
    )


def live_request(name: str, output: list[int]) -> Any:
    """Return vLLM's request of a prompt that ends with the start marker."""
    tokens = {"prompt_token_ids": [START], "output_token_ids": output}
    params = SamplingParams()
    return SimpleNamespace(**tokens, request_id=name, sampling_params=params, is_finished=lambda: False)


LATER_TURNS = LaterTurns(lambda _: Template(), lambda: None)
FACTS = EngineFacts("m", NO_SENTENCES, False, LATER_TURNS, lambda *_: None, ("cuda", ""), SchedulerLimits({}))


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Agent:
    """Return an agent on a link without a thread."""
    link = ControlStream(["nowhere:1"], agent_pb2.Hello, lambda _: MARKERS, lambda _: None, clock=lambda: 1.0)
    monkeypatch.setattr(scheduler_api, "is_async", lambda _: False)
    return Agent(scheduler_of(), MARKERS, link, FACTS)


def scheduled(tokens: dict[str, int], drafted: dict[str, list[int]] | None = None, new: Sequence[str] = ()) -> Any:
    """Return the SchedulerOutput of a step."""
    return SimpleNamespace(
        num_scheduled_tokens=tokens,
        scheduled_spec_decode_tokens=drafted or {},
        total_num_scheduled_tokens=sum(tokens.values()),
        scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in new],
    )


def test_settings_that_come_while_an_idle_engine_looks_are_obeyed(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link's thread has confirmed the settings, so the engine's thread must find them at its next look."""

    def settings_come() -> int:
        settings = agent_pb2.Settings(
            revision=7, nonce=1, lease_ms=30_000, max_think_tokens=50, answer_reserve_tokens=9
        )
        agent.link._receive(agent_pb2.ConnectResponse(settings=settings))
        return 0

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(agent.link, "lapsed", settings_come)
        agent.take_arrived(scheduler_of())
    status: Any = agent.link.outbox.ring.get_nowait()
    assert status.settings_status.revision == 7
    agent.take_arrived(scheduler_of())
    assert (agent.tracker.default_cap, agent.tracker.default_reserves) == (50, (9, 9))
    monkeypatch.setattr(agent.link, "lapsed", lambda: CAPS)
    agent.take_arrived(scheduler_of())
    assert (agent.tracker.default_cap, agent.tracker.default_reserves) == (None, (0, 0))
    monkeypatch.setattr(agent.link, "lapsed", lambda: 0)
    agent.take_arrived(scheduler_of())
    assert (agent.tracker.default_cap, agent.tracker.default_reserves) == (50, (9, 9))


def test_the_seconds_of_the_hooks_do_not_fall_when_a_step_ends_meanwhile(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control plane computes them as what is left of all, and Prometheus takes a fall for a restart."""
    steps = itertools.count(1.0)
    monkeypatch.setattr(Agent, "worker_seconds", property(lambda _: next(steps)), raising=False)
    said = dict(zip(COUNTERS, agent._counters(), strict=True))
    assert said["agent_seconds"] - said["worker_seconds"] - said["thread_seconds"] == pytest.approx(agent.hook_seconds)


def test_caps_end_with_their_lease_also_where_a_freeze_begins_in_that_step(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = opened(agent.tracker, "a")
    cap = agent_pb2.ThinkCap(decision_id=1, slot=live.slot, max_think_tokens=50)
    agent.directives.accept(agent_pb2.Directives(step=9, caps=[cap]))
    monkeypatch.setattr(agent.link, "lapsed", lambda: ORDER | CAPS)
    agent.link.lease.freeze_for(60)
    agent.take_arrived(scheduler_of())
    assert live.limit is None
    assert [outcome[:2] for outcome in agent.tracker.record.outcomes] == [(1, Outcome.AGENT_OFF)]


def test_the_token_of_a_step_stops_as_the_decisions_before_its_masks_say(agent: Agent) -> None:
    """Their outcomes are reported at once, so that vLLM must not stop the request for an earlier one any more."""
    armed: dict[str, str] = {}
    port: Any = SimpleNamespace(
        arm=lambda ref, url, *_: armed.update({ref.request_id: url}),
        disarm=lambda ref: armed.pop(ref.request_id, None),
    )
    agent.hand_over._port = port
    agent.directives.hand_overs.refusal = ""
    agent.link.lease.begins()
    live = opened(agent.tracker, "a", ref=SimpleNamespace(request_id="a"), hand_over_candidate=True)
    for number, url in enumerate(("http://b", "http://c", ""), 1):
        decided = agent_pb2.HandOver(decision_id=number, slot=live.slot, url=url, ref="r")
        agent.link.inbox.put(agent_pb2.Directives(step=9, hand_overs=[decided]))
        agent.bitmask(scheduler_of(), scheduled({"a": 1}), None)
        assert armed == ({"a": url} if url else {})


def test_the_next_hello_is_said_at_once_where_another_backend_measures_than_was_expected(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link says hello again only if the worker reports another backend than before."""
    restarts: list[None] = []
    monkeypatch.setattr(agent.measuring, "_restart", lambda: restarts.append(None))
    for backend, said in ((("cuda", ""), 0), (("torch", "no CuPy"), 1), (("torch", "no CuPy"), 1), (("cuda", ""), 2)):
        agent.measuring._hear_backend((*backend, False, OF_THE_START))
        assert (agent.measuring.backend, len(restarts)) == (backend, said)


@pytest.mark.parametrize(
    ("scheduled_tokens", "drafted", "prompt"),
    [
        ({"a": 1, "b": 30}, {}, 29),
        ({"a": 4, "b": 30}, {"a": 3}, 29),
        # A diffusion model scores a canvas and samples no token after it.
        ({"a": 4}, {"a": 4}, 0),
        ({"a": 4, "b": 30}, {"a": 4}, 29),
    ],
)
def test_prompt_tokens_of_a_step_are_what_is_neither_sampled_nor_drafted(
    agent: Agent, scheduled_tokens: dict[str, int], drafted: dict[str, int], prompt: int
) -> None:
    output = scheduled(scheduled_tokens, {name: [7] * drafts for name, drafts in drafted.items()})
    agent.after_schedule(scheduler_of(), output)
    assert list(agent.accounts.prefills) == [prompt]


def test_nothing_is_measured_while_all_requests_of_the_steps_answer(agent: Agent) -> None:
    agent.observe_entropy = True
    for name, prompt in (("a", [START]), ("b", [START, END]), ("waits", [START])):
        opened(agent.tracker, name, prompt)
    asked = []
    for _ in range(2):
        output = scheduled({"a": 1})
        agent.after_schedule(scheduler_of(), output)
        asked.append(hasattr(output, REQUEST))
        agent.tracker.feed(agent.tracker.by_id["a"], [END], 0)
    assert asked == [True, False]


def test_batches_of_a_pipeline_that_take_turns_make_no_step_urgent(agent: Agent) -> None:
    agent.observe_entropy = agent.link.lease.merge_unmeasured = True
    opened(agent.tracker, "thinks", [START])
    opened(agent.tracker, "answers", [START, END])
    agent.tracker.take_record()
    urgent = []
    for name in ("answers", "thinks", "answers", "thinks"):
        scheduler = scheduler_of()
        scheduler.running = [*agent.tracker.by_id]
        agent.after_schedule(scheduler, scheduled({name: 1}))
        urgent.append(agent.tracker.take_record().urgent)
    assert urgent == [False, True, False, False]


def test_a_new_request_is_reported_sooner_where_a_step_has_draft_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    link = ControlStream(["nowhere:1"], agent_pb2.Hello, lambda _: MARKERS, lambda _: None, clock=lambda: 1.0)
    monkeypatch.setattr(scheduler_api, "is_async", lambda _: False)
    link.lease.hold(agent_pb2.Settings(lease_ms=30_000, report_interval_steps=24), None)
    Agent(SimpleNamespace(**{**vars(scheduler_of()), "num_spec_tokens": 7}), MARKERS, link, FACTS)
    assert link.outbox._wanted() == (3, 24)


def test_a_requests_first_step_ends_its_queueing_time(agent: Agent) -> None:
    """Resumed requests, which Model Runner V2 lists as new ones, have joined a step before; a probe is no request."""
    known = begin(MARKERS, [START], True)
    for name, queued_s in (("a", 10.0), ("b", 11.5), ("adopted", None)):
        info = RequestInfo(name, "m", "", "", 1, 100, None)
        agent.tracker.enter(info, replace(known), 0, SimpleNamespace(), queued_s=queued_s)
    assert [row[-2] for row in agent.tracker.snapshot()] == [True, True, False]

    def schedule(began_s: float, new: list[str], running: list[str]) -> None:
        agent.accounts.began_s = began_s
        output = scheduled(dict.fromkeys([*new, *running], 1), new=new)
        agent.after_schedule(scheduler_of(), output)

    schedule(12.5, ["adopted", "probe", "a"], [])
    schedule(12.75, ["b", "a"], ["adopted"])
    schedule(13.0, ["b"], ["a", "adopted"])
    assert agent.tracker.record.joined == [(0, 2500.0), (1, 1250.0)]
    assert [row[-2] for row in agent.tracker.snapshot()] == [False, False, False]
    assert [row[-2] for row in agent.tracker.record.opened] == [True, True, False], "as it was when they were opened"


def test_a_busy_engine_whose_markers_become_known_sends_few_snapshots(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each snapshot has all live requests, so that not each step that reads some of them again may send one."""
    snapshots: list[float] = []
    monkeypatch.setattr(agent.link.outbox, "resync", lambda: snapshots.append(agent.accounts.began_s))
    agent.put_in_force(agent_pb2.Settings(), NO_MARKERS)
    for name in map(str, range(190)):
        opened(agent.tracker, name, ref=live_request(name, []))
    agent.put_in_force(agent_pb2.Settings(), MARKERS)
    snapshots.clear()
    while agent._adoption:
        agent.accounts.began_s += 0.3
        agent._adopt_some(scheduler_of())
    assert {live.phase for live in agent.tracker.by_id.values()} == {Phase.THINK}
    assert snapshots == pytest.approx([0.3, 1.5, 2.7, 3.6])


def test_a_request_that_ends_before_the_snapshot_of_its_reading_loses_no_tokens(agent: Agent) -> None:
    """The four requests are read again in three steps, of which the second sends no snapshot."""
    link = agent.link
    link._receive(agent_pb2.ConnectResponse(welcome=agent_pb2.Welcome(session_id="s")))
    agent._take_inbox()
    agent.put_in_force(agent_pb2.Settings(), NO_MARKERS)
    for name in "abcd":
        opened(agent.tracker, name, ref=live_request(name, [TEXT] * 5000))
    agent.put_in_force(agent_pb2.Settings(), MARKERS)
    snapshots = []
    for ends in ("", "b", ""):
        agent.accounts.began_s += 0.3
        agent._adopt_some(scheduler_of())
        if ends:
            agent.accounts.close(agent.tracker.by_id[ends], "stop")
        agent.accounts.send()
        while link.outbox.ring.qsize():
            item = link.outbox.ring.get_nowait()
            if isinstance(item, SnapshotRecord):
                snapshots.append(([row[3] for row in item.rows], [tokens for _, tokens in item.ended]))
    assert snapshots == [([5000, 0, 0, 0], []), ([5000, 5000, 5000], [5000])]


STEP_HOOKS = {"before_schedule", "after_schedule", "bitmask", "after_update"}
# Hooks that change no request's state while steps may be postponed.
HARMLESS = {"admit", "preempting", "finishing", "unfinished", "resetting"}
OTHER_HOOKS = sorted({name for name, each in vars(Agent).items() if hasattr(each, "cause")} - STEP_HOOKS - HARMLESS)


@pytest.mark.parametrize("name", OTHER_HOOKS)
def test_postponed_steps_come_before_any_other_event(name: str) -> None:
    """A hook may read or change what these steps have not changed yet."""

    def process() -> None:
        raise RuntimeError("they are processed")

    agent = SimpleNamespace(accounts=SimpleNamespace(take_postponed=process))
    with pytest.raises(RuntimeError, match="they are processed"):
        getattr(Agent, name)(agent)
