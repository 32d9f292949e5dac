"""The behaviour of the real engine while the control plane is gone, or has frozen the engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from vllm import SamplingParams

from meridian_agent.core.probe_admission import MAX_HOLD_MS
from tests.engine import ENGINE_ARGS, FIRST_TOKENS, Run, cases, chat, confirmed, rebuild
from tests.engine.pacing import Settled, waits
from tests.engine.policies import CONVERGED, NEUTRAL
from tests.engine.recording import records
from tests.engine.test_budgets import shown
from tests.engine.test_decisions import endless, opened
from tests.engine.test_equality import GREEDY
from tests.engine.test_rules import paragraph_rule
from tests.processes import Control, wait_for

# A policy that ends the thinking of every case that thinks.
CAPPED: dict[str, Any] = {"scheduler": {"max_think_tokens": 12}}
# The same, with fewer requests at once.
LIMITED: dict[str, Any] = {**CAPPED, "engine": {"max_num_active_seqs": 3}}
PLACES = ENGINE_ARGS["max_num_seqs"]


@pytest.fixture
def lost(control: Control, scheduler: Any) -> Iterator[None]:
    """Restore the control plane and the agent's clock after a test, whatever it does to them."""
    yield
    scheduler._agent.link.lease.clock = time.monotonic
    control.process.kill()
    control.start()
    control.engine()


def kill(control: Control, agent: Any) -> None:
    control.process.kill()
    wait_for(lambda: not agent.link.lease.connected, 20, "the stream to end")


# ------------------------------------------------------------------------------------------------------------- freeze


def test_frozen_output_is_stocks(
    llm: Any, agent: Any, scheduler: Any, control: Control, stock: list[list[int]]
) -> None:
    """The policy caps and forces, and requests have caps of their own; a thaw brings all of it back."""
    control.apply({**CONVERGED, "scheduler": {"max_think_tokens": 40, "min_think_tokens": 4}})
    ends = dict(control.settled().ends)
    assert chat(llm, cases(), GREEDY) != stock

    def more_ends() -> bool:
        ended = control.settled().ends
        return any(ended[reason] > ends.get(reason, 0) for reason in ("hard_cap", "eat"))

    wait_for(more_ends, 20, "the report of an end")
    control.apply(LIMITED)
    capped = chat(llm, cases(), GREEDY)
    assert scheduler.max_num_active_reqs == 3
    control.freeze()
    confirmed(control, True)
    before = control.settled()
    assert chat(llm, cases(), GREEDY) == stock
    assert scheduler.max_num_active_reqs == PLACES
    own = SamplingParams(temperature=0.0, max_tokens=FIRST_TOKENS, extra_args={"meridian_max_think_tokens": 3})
    assert chat(llm, cases(), own) == stock
    after = control.settled()
    assert after.token_events > before.token_events
    assert after.decisions == before.decisions
    control.thaw()
    confirmed(control, False)
    assert chat(llm, cases(), GREEDY) == capped
    assert scheduler.max_num_active_reqs == 3


def test_requests_in_flight_are_let_go_and_taken_up_again(
    llm: Any, agent: Any, control: Control, settled: Settled
) -> None:
    control.apply({"scheduler": {"max_think_tokens": 90}})
    before = control.settled()
    run = Run(llm)
    run.add("r", opened(), endless(agent, max_tokens=150))
    run.until(lambda: len(run.tokens["r"]) > 10)
    control.freeze()
    wait_for(lambda: agent.link.mailbox.arrived, 20, "the freeze to arrive")
    run.step()
    confirmed(control, True)
    assert len(run.tokens["r"]) < 90
    looks = agent.calm.full_steps
    with records(agent) as seen:
        run.until(lambda: len(run.tokens["r"]) > 80)
    assert agent.calm.full_steps - looks < 10, "frozen steps are not calm"
    run.until(lambda: len(run.tokens["r"]) > 110)
    end = agent.tracker.markers.end[0]
    assert end not in run.tokens["r"]
    assert len(seen) > 40
    assert not any(record.told for record, *_ in seen), "a frozen engine measures logits"

    def cap() -> Any:
        (live,) = agent.tracker.by_id.values()
        return live.cap

    before_thaw = cap()
    control.thaw()
    wait_for(lambda: agent.link.mailbox.arrived, 20, "the thaw to arrive")
    run.step()
    wait_for(lambda: cap() is not before_thaw or waits(agent, "caps"), 20, "the cap to arrive")
    run.until(settled=settled)
    assert 110 < run.tokens["r"].index(end) < 149
    assert control.settled().outcomes["agent_off"] > dict(before.outcomes).get("agent_off", 0)


def held_for_a_probe(llm: Any, agent: Any, control: Control, settled: Settled) -> Run:
    """Return requests of which at least one is held for the decision from its probe."""
    control.apply(paragraph_rule(MAX_HOLD_MS))
    run = Run(llm)
    for number, case in enumerate(cases()):
        run.add(f"r{number}", case, GREEDY)
    run.until(lambda: agent.probing.held, settled=settled)
    assert agent.probing.held
    return run


def lets_go(agent: Any, run: Run, stock: list[list[int]]) -> None:
    """Check that one step later no probe is under way and no request is held, and that all requests go on as stock."""
    run.step()
    assert (agent.probing.placed, agent.probing.held) == ({}, {})
    run.until()
    assert [run.tokens[f"r{number}"] for number in range(len(stock))] == stock


def test_a_freeze_lets_held_requests_go(
    llm: Any, agent: Any, control: Control, settled: Settled, stock: list[list[int]]
) -> None:
    run = held_for_a_probe(llm, agent, control, settled)
    control.freeze()
    wait_for(lambda: agent.link.mailbox.arrived, 20, "the freeze to arrive")
    lets_go(agent, run, stock)


@pytest.mark.usefixtures("lost")
def test_the_end_of_a_lease_lets_held_requests_go(
    llm: Any, agent: Any, control: Control, settled: Settled, stock: list[list[int]]
) -> None:
    run = held_for_a_probe(llm, agent, control, settled)
    kill(control, agent)
    ahead_s = agent.link.lease.lease_s + 1
    agent.link.lease.clock = lambda: time.monotonic() + ahead_s
    lets_go(agent, run, stock)


@pytest.mark.usefixtures("lost")
def test_the_time_limit_holds_without_a_control_plane(
    llm: Any, agent: Any, control: Control, stock: list[list[int]]
) -> None:
    control.apply(CAPPED)
    capped = chat(llm, cases(), GREEDY)
    control.freeze(600)
    try:
        confirmed(control, True)
        kill(control, agent)
        assert chat(llm, cases(), GREEDY) == stock
        run = Run(llm)
        run.add("r", opened(), endless(agent, max_tokens=300))
        run.until(lambda: len(run.tokens["r"]) > 100)
        end = agent.tracker.markers.end[0]
        assert end not in run.tokens["r"]
        agent.link.lease.clock = lambda: time.monotonic() + 601
        run.until()
        assert run.tokens["r"].index(end) < 110, "a request in flight is not taken up again"
        assert chat(llm, cases(), GREEDY) == capped
    finally:
        control.start()
        control.thaw()
        confirmed(control, False)


@pytest.mark.usefixtures("lost")
def test_frozen_by_the_environment(  # noqa: PLR0917
    llm: Any, agent: Any, scheduler: Any, control: Control, stock: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    revision = control.apply(CAPPED)
    monkeypatch.setenv("MERIDIAN_FREEZE", "1")
    rebuild(scheduler)
    try:
        wait_for(lambda: control.engine().freeze.confirmed and control.engine().acked_revision == revision, 20, "Hello")
        assert not control.engine().freeze.HasField("end_time")
        assert chat(llm, cases(), GREEDY) == stock
    finally:
        monkeypatch.delenv("MERIDIAN_FREEZE")
        rebuild(scheduler)
    confirmed(control, False)


# -------------------------------------------------------------------------------------------- without a control plane


@pytest.mark.usefixtures("lost")
def test_an_engine_starts_from_what_it_had(llm: Any, agent: Any, scheduler: Any, control: Control) -> None:
    """While the control plane is down, the default cap, the limits of the scheduler and the markers are those of the
    last start, and the link names their revision."""
    text = "Wait . "
    revision = control.apply({**LIMITED, "model": {"maze": {"closing_text": text}}})
    capped = chat(llm, cases(), GREEDY)
    assert capped[0][12:14] == llm.get_tokenizer().encode(text, add_special_tokens=False)
    file = state_file(scheduler)
    wait_for(lambda: (kept := file.load()) and kept.revision == revision, 20, "the settings to be kept")
    kill(control, agent)
    again = rebuild(scheduler)
    assert (again.link.lease.revision, again.link.lease.connected) == (revision, False)
    assert chat(llm, cases(), GREEDY) == capped
    assert scheduler.max_num_active_reqs == 3
    again.link.lease.clock = lambda: time.monotonic() + 100
    assert chat(llm, cases(), GREEDY) == capped, "the caps ended with the lease"
    assert scheduler.max_num_active_reqs == 3, "the limits ended with the lease"
    control.start()
    wait_for(lambda: control.engine().acked_revision == revision, 20, "the agent to come back")


def state_file(scheduler: Any) -> Any:
    from meridian_agent.link.settings_file import StateFile, state_folder

    return StateFile(state_folder(), scheduler.engine_name.file_name, "maze")


@pytest.mark.usefixtures("lost")
def test_a_sections_lease_ends_its_caps(llm: Any, agent: Any, control: Control, stock: list[list[int]]) -> None:
    """The lease ends the caps of running and of new requests, but not a request's own cap.

    When the control plane is back, the caps are, too.
    """
    control.apply({"scheduler": {"max_think_tokens": 12, "lease_ms": 60_000}})
    capped = chat(llm, cases(), GREEDY)
    assert capped != stock
    kill(control, agent)
    assert chat(llm, cases(), GREEDY) == capped
    agent.link.lease.clock = lambda: time.monotonic() + 100
    assert chat(llm, cases(), GREEDY) == stock
    (own,) = chat(llm, [opened()], endless(agent, max_tokens=40, extra_args={"meridian_max_think_tokens": 7}))
    assert own.index(agent.tracker.markers.end[0]) == 7
    agent.link.lease.clock = time.monotonic
    control.start()
    control.engine()
    wait_for(lambda: control.engine().acked_revision, 20, "the policy to be acknowledged")
    assert chat(llm, cases(), GREEDY) == capped


@pytest.mark.usefixtures("lost")
@pytest.mark.parametrize("falls_idle", [False, True])
def test_thinking_without_a_control_plane_counts_for_its_budget_afterwards(
    llm: Any, agent: Any, control: Control, falls_idle: bool
) -> None:
    """The control plane is killed while the engine thinks; meanwhile a request ends, another one begins and ends, and
    all requests end if the engine falls idle."""
    name = f"crash-{falls_idle}"
    budget = {"name": name, "tenant": "acme", "tokens_per_day": 10**9}
    control.apply({"scheduler": {"max_think_tokens": 900}, "entropy": {"enabled": False}, "budget": [budget]})
    run = Run(llm)

    def add(request_id: str, max_tokens: int, tenant: str = "acme") -> None:
        own = {"meridian_tenant": tenant}
        run.add(request_id, opened(), endless(agent, max_tokens=max_tokens, extra_args=own))

    def stored(tokens: int) -> None:
        wait_for(lambda: shown(control).used_tokens == tokens and not shown(control).unsaved_tokens, 60, f"{tokens}")

    add("long", 150)
    add("ends", 60)
    add("other", 90, "other")
    run.until(lambda: len(run.tokens["ends"]) == 20)
    # The last reports wait for further steps, for half a second at most.
    stored(len(run.tokens["long"]) + 20)
    kill(control, agent)
    add("brief", 30)
    run.until(lambda: "brief" in run.finished and "ends" in run.finished)
    if falls_idle:
        run.until()
    control.start()
    wait_for(lambda: agent.link.lease.connected, 20, "a stream")
    run.until()
    stored(150 + 60 + 30)


# ----------------------------------------------------------------------------------------------------------- delivery


def test_an_ack_means_that_a_step_has_begun_with_it(llm: Any, agent: Any, control: Control) -> None:
    before = control.engine().acked_revision
    run = Run(llm)
    run.add("r", opened(), endless(agent, max_tokens=60))
    run.until(lambda: len(run.tokens["r"]) > 3)
    revision = control.set_policy({"scheduler": {"max_think_tokens": 20}})
    wait_for(lambda: agent.link.mailbox.arrived, 20, "the settings to arrive")
    time.sleep(0.2)
    assert (control.engine().acked_revision, agent.link.lease.revision, agent.default_cap) == (before, before, 100_000)
    run.step()
    assert (agent.link.lease.revision, agent.default_cap) == (revision, 20)
    wait_for(lambda: control.engine().acked_revision == revision, 20, "the ACK")
    run.until()


def test_after_a_refusal_and_a_reconnect_the_last_good_policy_governs(llm: Any, agent: Any, control: Control) -> None:
    """The engine keeps it and reports the error, until the next good policy."""
    good = control.apply(CAPPED)
    capped = chat(llm, cases(), GREEDY)
    bad = control.set_policy({**NEUTRAL, "model": {"maze": {"think_end_token_ids": [999_999]}}})
    wait_for(lambda: control.engine().nack_error, 20, "a NACK")
    assert (control.engine().acked_revision, "999999" in control.engine().nack_error) == (good, True)
    nacked = control.engine().connect_time
    agent.link.restart()
    engine = wait_for(
        lambda: (e := control.engine()).connect_time != nacked and e.acked_revision == good and e,
        20,
        "the last good one",
    )
    assert (engine.revision, "999999" in engine.nack_error) == (bad, True)
    assert chat(llm, cases(), GREEDY) == capped
    assert control.settled().decisions["cap"] == len(cases())
    assert control.apply(NEUTRAL) > bad
    assert not control.engine().nack_error
