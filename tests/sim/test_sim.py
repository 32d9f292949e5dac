"""Some seeds of the simulator, and direct tests of bugs that seeds have found."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import pytest

from tests.needed import VLLM

pytest.importorskip("vllm", reason=VLLM.reason)

from collections.abc import Iterator

from meridian.v1 import agent_pb2, fleet_pb2

from meridian_agent.core.live_request import LiveRequest
from meridian_agent.engine.lifecycle import Lifecycle
from meridian_agent.link.control_stream import ControlStream
from meridian_control.engine.decision_ledger import CARRIED_OUT
from meridian_control.engine.freeze_state import Freeze, Match
from meridian_control.journal.messages import decision_message
from meridian_control.page.words import end_row
from meridian_control.policy.model import Policy
from tests.sim.engine import Script, Shape, mix, words
from tests.sim.inject import Fault
from tests.sim.lines import OPTIONS, broken, cases
from tests.sim.world import Options, World, run

pytestmark = pytest.mark.filterwarnings("ignore")
# One line in this many is tested.
SAMPLED = 97
CAP = "meridian_max_think_tokens"


def test_seeds() -> None:
    # In the last one snapshots come while steps are postponed; their tokens must not count twice.
    for seed in (*range(40), 71845):
        run(seed)


@pytest.mark.parametrize("seed", [54, 75, 97])
def test_ends_of_operators_are_decided_under_faults_and_are_in_the_recording(seed: int) -> None:
    """The run checks that each decision has one outcome, and that the recording replays byte for byte."""
    world = run(seed)
    recordings = world.server.recordings
    records = [fleet_pb2.TraceRecord.FromString(record) for recording in recordings for record in recording._waiting]
    asked = [record.end_thinking.request_id for record in records if record.HasField("end_thinking")]
    forces = [force for record in records for force in record.down.directives.forces]
    decided = [force for force in forces if force.reason == agent_pb2.FORCE_REASON_OPERATOR]
    assert 0 < len(decided) == world.ended <= len(asked)


def test_a_seed_gives_the_same_run_again() -> None:
    traces = [run(3, Options(trace=True)).invariants.trace for _ in range(2)]
    assert traces[0] == traces[1]
    assert len(traces[0] or []) > 20


def test_a_seed_takes_the_same_lines_wherever_its_requests_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent goes through requests in an order that does not depend on their addresses in memory."""
    reached = []
    for salt in (1, 2):
        monkeypatch.setattr(LiveRequest, "__hash__", lambda live, salt=salt: mix(salt, live.slot, live.opened_step))
        world = run(82, replace(OPTIONS, ticks=80, longest=100, fault=Fault()))
        assert world.injected is not None
        reached.append(world.injected.reached)
    assert reached[0] == reached[1]


# -------------------------------------------------------------------------------------- bugs that the simulator found


@contextmanager
def started(shape: Shape, policy: Policy | None = None) -> Iterator[World]:
    """Yield a world without faults; at the end of the block its requests run to their ends. policy: None for the
    default. The block patches by the world's `patch`, which undoes the newest patch first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(World, "policy", lambda *_: policy or Policy())
        world = World(1, Options(ticks=0, shape=shape, trace=True), patch)
        yield world
        world.run()


@pytest.mark.parametrize("cap", [0, 1, 2])
def test_a_cap_in_the_first_step_of_an_idle_engine_that_schedules_ahead(cap: int) -> None:
    """An idle engine that schedules ahead has no step under way for which vLLM could wait."""
    start, end, *_ = words()
    with started(Shape(is_async=True)) as world:
        (plant,) = world.plants
        plant.open("a", [start], Script(1, think_mean=1000, answer_mean=5, restless=False), {CAP: cap})
    assert plant.engine.model.tokens["a"].index(end) == 1 + cap


def test_a_model_stops_where_a_draft_was_expected_to_begin_the_marker_that_a_cap_ends() -> None:
    """The draft is rejected with the stop, so that the end has to write the whole marker."""
    start, end, _, text = words()
    markers = {"model": {"m": {"think_start_token_ids": [start], "think_end_token_ids": [text[0], end]}}}
    with started(Shape(drafts=2, places=8, blocks=200), Policy.model_validate(markers)) as world:
        (plant,) = world.plants
        world.network.latency_ms = 0.0
        with world.timeline.running():
            for _ in range(3):
                world.pass_time(0.01)
        for seed in range(300):
            plant.open(f"r{seed}", [start], Script(seed, 1000, 5, restless=False, stops=4), {CAP: 3 + seed % 4})


@pytest.mark.parametrize("section", ["shadow", "in force"])
def test_an_end_by_the_answer_reserve_is_not_said_to_be_a_cap_that_was_reached(section: str) -> None:
    """With its closing text the thinking that the reserve ends is longer than the cap."""
    start, *_ = words()
    scheduler = {"max_think_tokens": 13, "answer_reserve_tokens": 3, "answer_reserve_for": "all", "min_think_tokens": 0}
    sections = {"scheduler": scheduler | {"shadow": section == "shadow"}, "entropy": {"enabled": False}}
    held = Policy.model_validate(sections | {"model": {"m": {"closing_text": "Wait ."}}})
    with started(Shape(places=8, blocks=200), held) as world:
        (plant,) = world.plants
        for name, most, stops in (("cap", 100, 0), ("reserve", 16, 0), ("stop", 100, 8)):
            plant.open(name, [start], Script(1, 1000, 5, restless=False, max_tokens=most, stops=stops), {})
    assert world.server.fleet is not None
    told = map(decision_message, world.server.fleet.decisions.decisions("cap"))
    reasons = {one.request_id: end_row(one)["reason"] for one in told if one.outcome in CARRIED_OUT}
    assert reasons == {"cap": "cap reached", "reserve": "answer reserve", "stop": "answer reserve"}


def test_a_request_that_thinks_anew_within_its_drafts_is_held_to_its_cap() -> None:
    start, *_ = words()
    with started(Shape(drafts=2, places=8, blocks=200)) as world:
        (plant,) = world.plants
        for seed in range(60):
            plant.open(f"r{seed}", [start], Script(seed, think_mean=9, answer_mean=40, restless=True), {CAP: 2})
    assert plant.books.forced_tokens > 60, "some of them began to think anew"


def test_a_token_that_comes_after_the_preemption_is_no_resumption() -> None:
    start, *_ = words()
    with started(Shape(is_async=True, places=8, blocks=24)) as world:
        (plant,) = world.plants
        for seed in range(12):
            plant.open(f"r{seed}", [start] * 20, Script(seed, 30, 40, restless=False), {CAP: 20})
    agent = plant.engine.agent
    assert agent.preempted_think + agent.output_critical > 0


def test_an_answer_whose_prompt_came_in_pieces_goes_before_thinking() -> None:
    """The agent knows the request's phase from its prompt, so its first token changes nothing."""
    start, end, _, text = words()
    with started(Shape(places=8, blocks=200, batch_tokens=32)) as world:
        (plant,) = world.plants
        thinking, answering = Script(1, 1000, 40, restless=False), Script(2, 1000, 1000, restless=False, max_tokens=20)
        plant.open("a", [start], thinking, {})
        with world.timeline.running():
            for _ in range(20):
                world.pass_time(0.01)
        plant.open("b", [text[0]] * 90 + [start, end], answering, {})


def test_a_freeze_that_is_over_before_a_step_sees_it() -> None:
    """The control plane waits for a snapshot before it decides again, so the agent has to send one."""
    start, *_ = words()
    with started(Shape(places=8, blocks=200)) as world:
        (plant,) = world.plants
        world.network.latency_ms = 0.0
        plant.open("a", [start], Script(1, 1000, 40, restless=False), {})
        with world.timeline.running():
            for _ in range(20):
                world.pass_time(0.01)
            now = world.timeline.utc_now()
            frozen = Freeze(1, Match(), "test", "", now, now + timedelta(seconds=20))
            assert plant.link is not None
            assert plant.link.stream is not None
            session = plant.link.stream.connection.session  # type: ignore[union-attr]
            for freezes in ((frozen,), ()):
                world.server.set_freezes(freezes)
                assert session.freezing.void
                world.network.tick()
            for _ in range(5):
                world.pass_time(0.01)
            assert plant.engine.busy()
            assert not session.freezing.void


def test_an_answer_that_is_resumed_in_pieces_leaves_no_place_for_a_stranger() -> None:
    """A resumed answer counts once while admission is held, as waiting or as running, until its next token steps
    later."""
    start, end, _, text = words()
    with started(Shape(places=8, blocks=200, batch_tokens=32)) as world:
        (plant,) = world.plants
        scheduler, answering = plant.engine.scheduler, Script(1, 1000, 1000, restless=False, max_tokens=40)
        for name, tokens in (("a", 90), ("b", 1)):
            plant.open(name, [*[text[0]] * tokens, start, end], answering, {})
        with world.timeline.running():
            for _ in range(12):
                world.pass_time(0.01)
            assert plant.link is not None
            plant.link.stalled_until_s = world.timeline.now_s + 5
            preempted = scheduler.requests["a"]
            (blocks,) = scheduler.kv_cache_manager.get_block_ids("a")
            scheduler.kv_cache_manager.evict_blocks(set(blocks))
            scheduler.running.remove(preempted)
            scheduler._preempt_request(preempted, 0.0)
            held = agent_pb2.DispatchPlan(hold_admission=True, stock=True)
            plant.engine.agent.directives.accept(agent_pb2.Directives(plan=held))
            plant.open("stranger", [text[1]], answering, {})
            pieces = 0
            while plant.engine.agent.tracker.by_id["a"].preempted:
                world.pass_time(0.01)
                pieces += 1
                assert [r.request_id for r in scheduler.waiting] == ["stranger"]
        assert pieces > 2


EVERYWHERE = {"enabled": True, "eat_probe_interval_tokens": 1, "eat_probe_placement": "anywhere", "eat_hold_ms": 50}
NEVER = {"eat_level_threshold_nats": 1e-9, "rank_conditions": []}
PROBED = Policy.model_validate({"entropy": {**EVERYWHERE, **NEVER}, "scheduler": {"min_think_tokens": 0}})


def crowded(shape: Shape, thinking: int) -> tuple[list[int], str]:
    """Run requests that think and are probed beside a sequence of prompts that come in pieces.

    Returns the tokens of each step with a probe and such a prompt, and the generated tokens as a text.
    """
    start, _, _, text = words()
    shared = []
    with started(shape, PROBED) as world:
        (plant,) = world.plants
        world.network.latency_ms = 0.0
        for number in range(thinking):
            plant.open(f"a{number}", [start], Script(number, 1000, 40, restless=False), {})
        with world.timeline.running():
            for tick in range(30):
                if tick % 3 == 0:
                    prompt = [text[tick % 6]] + [text[tick // 6]] * 89
                    plant.open(f"b{tick}", prompt, Script(tick, 1, 5, restless=False), {})
                pieces = any(r.is_prefill_chunk for r in plant.engine.scheduler.running)
                world.pass_time(0.01)
                if pieces and plant.engine.probes:
                    shared.append(plant.engine.scheduled_tokens)
    return shared, " ".join(world.invariants.trace or [])


@pytest.mark.parametrize("drafts", [0, 2])
def test_probes_share_steps_with_prompts_in_pieces(drafts: int) -> None:
    """Each prompt would take what its step has left, so a request would be held for a probe without room, or never
    probed."""
    shared, said = crowded(Shape(places=8, blocks=200, batch_tokens=32, drafts=drafts), thinking=1)
    assert len(shared) > 4
    assert max(shared) == 32, "what the probe took was all that the prompt came short of"
    assert "no room in the step" not in said


def test_a_probe_waits_where_a_step_has_nothing_to_spare() -> None:
    shared, said = crowded(Shape(places=32, blocks=200, batch_tokens=16), thinking=14)
    assert not shared
    assert "probes {" in said
    assert "no room in the step" not in said


def test_what_an_engine_owes_that_falls_idle_while_its_ring_is_full() -> None:
    """An engine falls idle while its ring is full, so no report follows the dropped one.

    The outcomes in the dropped report and the ends of its requests would never be told. So the stream begins anew,
    which makes them void.
    """
    start, *_ = words()
    with started(Shape(places=8, blocks=200)) as world:
        (plant,) = world.plants
        world.network.latency_ms = 1.0
        for seed in range(4):
            plant.open(f"r{seed}", [start], Script(seed, 30, 30, restless=False), {})
        with world.timeline.running():
            for _ in range(30):
                world.pass_time(0.01)
            assert plant.link is not None
            plant.link.stalled_until_s = world.timeline.now_s + 20
            while plant.engine.busy():
                world.pass_time(0.01)
            assert plant.link.outbox.reports_dropped
            assert plant.link.outbox._kept_outcomes
            while plant.link.stream is None or not plant.link.quiet():
                world.pass_time(0.5)
            plant.open("later", [start], Script(9, 5, 5, restless=False), {})


def test_a_lone_request_goes_on_in_the_coming_step_after_a_stop_under_asynchronous_scheduling() -> None:
    """The engine makes no step in between, so a model runner would not get the request's tokens."""
    start, end, stop, _ = words()
    with started(Shape(is_async=True)) as world:
        (plant,) = world.plants
        plant.open("a", [start], Script(1, 1000, 5, restless=False, stops=8), {})
    tokens = plant.engine.model.tokens["a"]
    assert tokens.index(end) > 2
    assert tokens.index(stop) > tokens.index(end)


def test_a_freeze_before_a_stopped_request_is_queued_anew_voids_its_end() -> None:
    start, *_ = words()
    with started(Shape(is_async=True)) as world:
        (plant,) = world.plants
        plant.open("a", [start], Script(1, 1000, 5, restless=False, stops=8), {})
        plant.open("b", [start], Script(2, 1000, 5, restless=False), {})
        stops, directives = plant.engine.agent.stops, plant.engine.agent.directives
        with world.timeline.running():
            while not stops.waiting:
                world.pass_time(0.01)
            directives.freeze()
            while stops.waiting:
                world.pass_time(0.01)
        assert plant.engine.agent.tracker.by_id["a"].ending is None


# -------------------------------------------------------------------------------------------------- faults of the agent


def test_a_fault_at_any_line_leaves_stock_vllm_and_an_agent_that_comes_back() -> None:
    """The test takes a sample of the lines that these seeds reach, and all lines with which the agent comes back;
    `python -m tests.sim --lines` takes all of them."""
    found = cases(range(4))
    assert len(found) > 700, "lines are not reached any more"
    back = {line for way in (Lifecycle.again, ControlStream.come_back) for *_, line in way.__code__.co_lines()}
    files = "engine/lifecycle.py", "link/control_stream.py"
    comes_back = [
        case for case in found if case.fault.line and case.fault.line[1] in files and case.fault.line[2] in back
    ]
    assert len(comes_back) >= 12, "the agent does not come back any more"
    assert [said for case in (*found[::SAMPLED], *comes_back) if (said := broken(case))] == []


def test_a_fault_brings_the_start_up_limits_back_until_the_agent_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    start, *_ = words()
    limits = {"max_num_active_seqs": 1, "max_num_scheduled_tokens": 40, "long_prefill_token_threshold": 16}
    with started(Shape(places=4, blocks=200), Policy.model_validate({"engine": limits})) as world:
        (plant,) = world.plants
        plant.books.may_fail = True
        assert plant.engine.limits() == (4, 64, 0)
        for number in range(3):
            plant.open(f"r{number}", [start], Script(number, 1000, 40, restless=False), {})
        with world.timeline.running():
            for _ in range(10):
                world.pass_time(0.01)
            assert plant.engine.limits() == (1, 40, 16)
            with monkeypatch.context() as without:
                without.setattr(type(plant.engine.agent), "after_schedule", None)
                world.pass_time(0.01)
            assert plant.engine.agent is None
            assert plant.engine.limits() == (4, 64, 0)
            world.pass_time(11)
            world.pass_time(0.01)
            assert plant.engine.limits() == (1, 40, 16)


def test_an_engine_hands_requests_over_while_its_end_marker_is_one_token() -> None:
    start, end, _, text = words()
    with started(Shape()) as world:
        (plant,) = world.plants
        lifecycle = plant.engine.scheduler._lifecycle
        # Nothing else is in the way of handovers.
        lifecycle._facts = replace(lifecycle._facts, no_hand_over="")
        cases = (([text[0], end], "the end marker has several tokens"), ([end], ""))
        for revision, (ending, reason) in enumerate(cases, 2):
            markers = {"think_start_token_ids": [start], "think_end_token_ids": ending}
            policy = Policy.model_validate({"model": {"m": markers}, "disagg": {"enabled": True}})
            world.patch.setattr(World, "policy", lambda *_, policy=policy: policy)
            with world.timeline.running():
                world.put_policy()
                for _ in range(200):
                    world.pass_time(0.05)
            assert world.server.fleet is not None
            (hello,) = (connection.session.hello for connection in world.server.fleet.connections)
            # A policy with handovers is accepted all the same, because the next one may change the markers.
            told = hello.revision, hello.capabilities.hand_over, hello.no_hand_over
            assert told == (revision, True, reason)
