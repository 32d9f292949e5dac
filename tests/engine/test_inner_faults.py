"""Faults inside the agent while the real engine serves: a stopped sender or link thread, and clock jumps.

Loads that could make the agent's memory or work grow are tested, too: very many requests, and a very long one. A hook
that waited for a stopped thread would never return, so these tests show that steps never wait.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
from meridian.v1 import agent_pb2
from vllm import SamplingParams

from meridian_agent.core.live_request import LiveRequest
from meridian_agent.core.step_record import StepRecord
from meridian_agent.engine import probe_runner as probing_module
from meridian_agent.engine import scheduler_mixin as scheduler_module
from meridian_agent.link import control_stream as link_module
from meridian_agent.link import outbox as outbox_module
from tests.engine import Run, cases, chat, prompt_ids
from tests.engine.test_decisions import endless, opened
from tests.engine.test_equality import GREEDY, WHOLE
from tests.engine.test_fail_static import CAPPED
from tests.processes import Control, wait_for

# The cap is out of reach, and no rule asks for a probe.
UNRULED: dict[str, Any] = {"scheduler": {"max_think_tokens": 100_000}}
FULL = 16
HOUR_S = 3600.0
# Requests come in batches as from a client; the first ones warm up the engine's caches.
BATCH = 75
# Largest number of rounds of three batches, which end once a round leaves no more behind.
MAX_ROUNDS = 20
# Allowed growth of the whole engine, which has only just begun to serve; Python's own memory has a tighter check.
MAX_GROWTH_MB = 96


@pytest.fixture
def gate(agent: Any) -> Iterator[threading.Event]:
    """Yield an event for which a stopped thread waits, at the latest until the test is over; then restore the link."""
    opening = threading.Event()
    yield opening
    opening.set()
    agent.link.__dict__.pop("_receive", None)
    agent.link.lease.clock = time.monotonic


def capped_again(llm: Any, agent: Any, control: Control) -> None:
    """Check that decisions are applied again, each has its outcome, nothing has failed, and all tables are empty."""
    (own,) = chat(llm, [opened()], endless(agent, max_tokens=40))
    assert agent.tracker.markers.end[0] not in own
    control.apply(CAPPED)
    (own,) = chat(llm, [opened()], endless(agent, max_tokens=40))
    assert own.index(agent.tracker.markers.end[0]) == 12
    engine = control.settled()
    assert (engine.fault, engine.open_decisions) == ("", 0)
    assert engine.agent_state == agent_pb2.AGENT_STATE_READY
    assert_empty(agent)


def assert_empty(agent: Any) -> None:
    tracker = agent.tracker
    probing = agent.probing
    for table in (tracker.by_id, tracker.by_slot, tracker.due, tracker.preempted, probing.placed, probing.held):
        assert not table
    assert (tracker.thinking, tracker.answering, list(agent.directives.probes)) == (0, 0, [])


def counted(agent: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of requests of each snapshot made from now on."""
    made, snapshot = list[int](), agent.tracker.snapshot

    def counts() -> Any:
        rows = snapshot()
        made.append(len(rows))
        return rows

    monkeypatch.setattr(agent.tracker, "snapshot", counts)
    return made


def test_a_full_ring(  # noqa: PLR0917
    llm: Any,
    agent: Any,
    control: Control,
    whole_stock: list[list[int]],
    gate: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gRPC takes no report any more, so reports are dropped and counted; later one snapshot replaces all of them."""
    whole = outbox_module.RING_RECORDS
    monkeypatch.setattr(outbox_module, "RING_RECORDS", FULL)
    control.apply(UNRULED)
    snapshots, link = counted(agent, monkeypatch), agent.link
    run = Run(llm)
    run.add("through", opened(), endless(agent, max_tokens=900))
    run.until(lambda: len(run.tokens["through"]) > 5)
    ring, dropped, before = link.outbox.ring, link.outbox.reports_dropped, len(snapshots)
    gather, standing = link.outbox._gather, threading.Event()

    def stands_still(*taken: Any) -> Any:
        standing.set()
        gate.wait()
        return gather(*taken)

    monkeypatch.setattr(link.outbox, "_gather", stands_still)
    # A sender that took a record from a full ring would make room for a snapshot.
    run.step()
    wait_for(standing.is_set, 20, "the sender to take a record")
    for i, case in enumerate(cases()):
        run.add(f"{i}", case, WHOLE.clone())
    run.until(lambda: len(run.finished) == len(cases()))
    assert [run.tokens[f"{i}"] for i in range(len(cases()))] == whole_stock
    assert ring.qsize() == FULL
    # The record in the sender's hands left room for at most one more.
    assert link.outbox.reports_dropped - dropped > 100
    assert (link.outbox.ring is ring, link.lease.connected, len(snapshots)) == (True, True, before)
    assert not gate.is_set()
    # On a busy machine so small a ring could be full again when the engine becomes idle, and that would end the stream.
    monkeypatch.setattr(outbox_module, "RING_RECORDS", whole)
    gate.set()
    wait_for(lambda: ring.qsize() == 0, 20, "the sender to take the waiting records")
    run.step()
    assert snapshots[before:] == [1]
    known = len(run.tokens["through"])

    def caught_up() -> list[Any]:
        # Each step wakes the sender for the record of the step before.
        run.step()
        return [r for r in control.requests() if r.think_tokens >= known]

    (shown,) = wait_for(caught_up, 20, "what was missed")
    assert shown.think_tokens <= len(run.tokens["through"])
    run.abort("through")
    wait_for(
        lambda: control.settled().counters.reports_dropped == link.outbox.reports_dropped, 10, "the drops to be shown"
    )
    capped_again(llm, agent, control)


def test_the_links_thread_stands_still(
    llm: Any, agent: Any, control: Control, stock: list[list[int]], gate: threading.Event
) -> None:
    """The thread sleeps over a message, without holding its lock; the engine goes on with the settings in force.

    The settings that arrive meanwhile are put in force later.
    """
    control.apply(CAPPED)
    capped = chat(llm, cases(), GREEDY)
    control.apply(UNRULED)
    link, receive, asleep = agent.link, agent.link._receive, threading.Event()

    def sleeps(response: Any) -> None:
        asleep.set()
        gate.wait()
        receive(response)

    link._receive = sleeps
    assert chat(llm, cases(), GREEDY) == stock
    assert asleep.wait(60)
    revision = control.set_policy(CAPPED)
    assert chat(llm, cases(), GREEDY) == stock
    assert link.mailbox._lock.acquire(blocking=False)
    link.mailbox._lock.release()
    assert (len(link.inbox.messages), len(link.mailbox.arrived)) == (0, 0)
    # Past the lease the state is DEGRADED, and the next step ends the stream, while its thread is still asleep.
    run = Run(llm)
    run.add("r", opened(), endless(agent, max_tokens=40))
    run.until(lambda: len(run.tokens["r"]) > 5)
    link.lease.clock = lambda: time.monotonic() + link.lease.lease_s + 1
    run.step()
    assert link.lease.state == agent_pb2.AGENT_STATE_DEGRADED
    run.until()
    assert chat(llm, cases(), GREEDY) == stock
    assert (gate.is_set(), link._thread.is_alive()) == (False, True)
    link.lease.clock = time.monotonic
    gate.set()
    wait_for(lambda: link.lease.connected and control.engine().acked_revision == revision, 20, "the policy to hold")
    assert chat(llm, cases(), GREEDY) == capped
    control.apply(UNRULED)
    capped_again(llm, agent, control)


@pytest.mark.parametrize("jump_s", [HOUR_S, -HOUR_S], ids=["forwards", "backwards"])
def test_clocks_jump(  # noqa: PLR0917
    llm: Any,
    agent: Any,
    scheduler: Any,
    control: Control,
    stock: list[list[int]],
    gate: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    jump_s: float,
) -> None:
    """The agent's clocks jump while requests run and probes are under way; the agent reads no wall clock."""
    jumped = [0.0]

    def reads(clock: Callable[[], float]) -> Callable[[], float]:
        return lambda: clock() + jumped[0]

    clocks = SimpleNamespace(monotonic=reads(time.monotonic), perf_counter=reads(time.perf_counter))
    for module in (probing_module, scheduler_module, link_module):
        monkeypatch.setattr(module, "time", clocks)
    monkeypatch.setattr(scheduler._guard, "_clock", clocks.monotonic)
    agent.link.lease.clock = clocks.monotonic
    run = Run(llm)
    for i, case in enumerate(cases()):
        run.add(f"{i}", case, GREEDY.clone())
    run.until(lambda: len(run.tokens["0"]) > 20)
    jumped[0] = jump_s
    run.until()
    assert [run.tokens[f"{i}"] for i in range(len(cases()))] == stock
    assert not scheduler._guard.fault
    wait_for(lambda: agent.link.lease.connected, 20, "a stream")
    # The clocks jump back while nothing runs.
    jumped[0] = 0.0
    assert chat(llm, cases(), GREEDY) == stock
    wait_for(lambda: agent.link.lease.state == agent_pb2.AGENT_STATE_READY, 20, "the agent to be ready")
    control.apply(UNRULED)
    capped_again(llm, agent, control)


def rss_mb() -> float:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def kept_blocks() -> int:
    gc.collect()
    return sys.getallocatedblocks()


def alive(kind: type) -> int:
    gc.collect()
    return sum(type(o) is kind for o in gc.get_objects())


def test_very_many_short_requests(llm: Any, agent: Any, scheduler: Any, control: Control) -> None:
    """No state of a request stays behind, slots are used again, and each request has all the tokens it asked for."""
    control.apply(UNRULED)
    prompts = [{"prompt_token_ids": prompt_ids(llm, case)[-8:]} for case in cases()]
    length = [1, 2, 3]

    def batch() -> int:
        params = [SamplingParams(max_tokens=length[i % 3], ignore_eos=True) for i in range(BATCH)]
        outputs = llm.generate([prompts[i % len(prompts)] for i in range(BATCH)], params, use_tqdm=False)
        return sum(len(o.outputs[0].token_ids) == length[i % 3] for i, o in enumerate(outputs))

    finished = [batch() for _ in range(3)]
    # Records that wait to be sent are not left behind.
    control.settled()
    before, tracked, slots = rss_mb(), alive(LiveRequest), agent.tracker._next_slot
    # A leak shows after each three batches; the caches of vLLM, NumPy and torch fill more and more slowly.
    kept, growth, rounds = kept_blocks(), BATCH, 0
    while growth >= BATCH:
        finished += [batch() for _ in range(3)]
        control.settled()
        rounds += 1
        assert rounds < MAX_ROUNDS, f"the last 3 * {BATCH} requests left {growth} blocks of memory behind"
        kept, growth = (now := kept_blocks()), now - kept
    assert finished == [BATCH] * len(finished)
    assert not scheduler._guard.fault
    assert_empty(agent)
    assert (alive(LiveRequest), agent.tracker._next_slot) == (tracked, slots)
    assert alive(StepRecord) <= outbox_module.RING_RECORDS
    assert rss_mb() - before < MAX_GROWTH_MB
    assert control.settled().open_decisions == 0
    capped_again(llm, agent, control)


def test_a_very_long_request(llm: Any, agent: Any, control: Control) -> None:
    """The agent makes as many calls in a late step of a long request as in an early one.

    The agent reads the request's tokens only for probes, which are requests of these tokens, and the newest tokens to
    look for loops.
    """
    control.apply(UNRULED)
    before = control.settled().decisions["probe"]
    run = Run(llm)
    run.add("long", opened(), endless(agent, max_tokens=300))
    run.until(lambda: len(run.tokens["long"]) > 40)
    (tracked,) = agent.tracker.by_id.values()
    reads = watched(tracked.ref)
    early = [calls_in(run.step) for _ in range(50)]
    run.until(lambda: len(run.tokens["long"]) > 240)
    late = [calls_in(run.step) for _ in range(50)]
    # An answer of the control plane may come in any of the steps, on a busy machine in most of them.
    assert 0 < min(late) <= 1.1 * min(early)
    run.until()
    assert set(reads) <= {"place", "_enter", "looks", "take"}
    probes = control.settled().decisions["probe"] - before
    # For a probe, the agent reads the number of tokens and then copies them. In a step it reads the new tokens.
    looks_for_loops = reads.count("looks") + reads.count("take")
    assert len(reads) - looks_for_loops <= 3 * probes < len(run.tokens["long"]) / 4
    assert looks_for_loops <= 3 * len(run.tokens["long"])
    assert len(run.tokens["long"]) == 300
    capped_again(llm, agent, control)


def watched(request: Any) -> list[str]:
    """Return a list that gets the name of the calling function at each of the agent's reads of a request's tokens."""
    reads: list[str] = []
    for name in ("all_token_ids", "output_token_ids"):
        tokens = getattr(request, name)
        setattr(request, name, type("Watched", (type(tokens),), looks(type(tokens), reads))(tokens._x))
    return reads


def looks(kind: type, reads: list[str]) -> dict[str, Any]:
    def look(name: str) -> Any:
        original = getattr(kind, name)

        def reading(self: Any, *args: Any) -> Any:
            if ours(sys._getframe(1)):
                reads.append(sys._getframe(1).f_code.co_name)
            return original(self, *args)

        return reading

    return {name: look(name) for name in ("__getitem__", "__iter__", "__len__")}


def ours(frame: FrameType) -> bool:
    return "/meridian_agent/" in frame.f_code.co_filename


def calls_in(step: Callable[[], object]) -> int:
    """Return the number of calls, into C too, that the agent makes on the engine's thread in a step."""
    calls = 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        calls += event in {"call", "c_call"} and ours(frame)

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls
