"""The lines about an engine's state, and the mark that something waits for the engine."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from meridian.v1 import agent_pb2

from meridian_agent.core.directives import ALL_BUT_CAPS, CAPS, MEMORY, ORDER, RULES
from meridian_agent.core.plain_log import BURST, PlainLog
from meridian_agent.link import lease as lease_module
from meridian_agent.link.inbox import Inbox
from meridian_agent.link.lease import Lease
from meridian_agent.link.mailbox import Arrived, Mailbox
from meridian_agent.link.record_queue import RecordQueue


def test_a_lost_lease_is_said_although_streams_have_come_and_gone_often(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log limits the lines of one kind; each state is a kind of its own."""
    logger = logging.Logger("an engine's")
    logger.addFilter(PlainLog(lambda: 0.0))
    logger.addHandler(caplog.handler)
    monkeypatch.setattr(lease_module, "logger", logger)
    now = 0.0
    lease = Lease(lambda: now)
    for _ in range(2 * BURST):
        lease.connected = not lease.connected
        lease.say_state()
    lease.begins()
    lease.connected, now = False, 2 * lease.lease_s
    lease.say_state()
    assert [text for text in caplog.messages if "DEGRADED" in text] == ["meridian: DEGRADED (revision 0)"]
    assert len(caplog.messages) <= 2 * BURST + 1


class LookedAt(deque[Any]):
    """A queue into which the engine's thread looks just before something is put there."""

    def __init__(self, lease: Lease) -> None:
        super().__init__()
        self._lease = lease

    def append(self, item: Any) -> None:
        self._lease.give_attention()
        super().append(item)

    def extend(self, items: Any) -> None:
        self._lease.give_attention()
        super().extend(items)


PLAN = agent_pb2.Directives(step=1, plan=agent_pb2.DispatchPlan(decision_id=1))


@pytest.mark.parametrize(
    "put",
    [
        lambda inbox, _: inbox.begin(),
        lambda inbox, _: inbox.put(PLAN),
        lambda _, mailbox: mailbox.arrive(Arrived(agent_pb2.ConnectRequest(), RecordQueue())),
    ],
    ids=["a new stream", "decisions", "settings"],
)
def test_what_is_put_behind_a_look_calls_for_another(put: Callable[[Inbox, Mailbox], None]) -> None:
    lease = Lease(lambda: 0.0)
    lease.begins()
    inbox = Inbox(lease)
    mailbox = Mailbox(lease, inbox, lambda _: None)
    inbox.messages, mailbox._waiting = LookedAt(lease), LookedAt(lease)
    put(inbox, mailbox)
    assert lease.attention


def test_each_section_has_a_lease_of_its_own() -> None:
    """A section's decisions end with its own lease, and all that are left with the general one."""
    now_s = 0.0
    lease = Lease(lambda: now_s)
    settings = agent_pb2.Settings(
        lease_ms=4000, scheduler_lease_ms=1000, entropy_lease_ms=2000, kv_memory_lease_ms=3000
    )
    lease.hold(settings, None)
    stale, scheduler = agent_pb2.AGENT_STATE_STALE, ORDER | CAPS
    for at_s, over, state in (
        (1.0, 0, stale),
        (1.1, scheduler, stale),
        (2.1, scheduler | RULES, stale),
        (3.1, scheduler | RULES | MEMORY, stale),
        (4.1, ALL_BUT_CAPS | CAPS, agent_pb2.AGENT_STATE_DEGRADED),
    ):
        now_s = at_s
        assert (lease.over(lease.silent_s()), lease.state) == (over, state)


@pytest.mark.parametrize("after_s", [0.0, 10.0, 29.0, 31.0, 59.0])
@pytest.mark.parametrize("connected", [True, False])
def test_the_leases_are_steady_until_then(connected: bool, after_s: float) -> None:
    """Nothing that follows from silence changes before that time, and something may at that time."""
    now_s = 100.0
    lease = Lease(lambda: now_s)
    lease.begins()
    lease.hold(agent_pb2.Settings(lease_ms=60_000, entropy_lease_ms=30_000), None)
    lease.found()
    lease.heard()
    if connected:
        lease.asks(now_s)
    else:
        lease.lost()
    now_s += after_s
    first = lease.over(lease.silent_s()), lease.state
    until_s = lease.steady_until()
    if until_s == 0.0:
        assert connected
        assert after_s > 30
        return
    assert until_s == (130.0 if after_s < 30 else 160.0)
    now_s = until_s
    assert (lease.over(lease.silent_s()), lease.state) == first
    now_s = until_s + 0.001
    assert (lease.over(lease.silent_s()), lease.state) != first


def test_an_engine_without_its_control_plane_is_steady_but_for_the_end_of_a_freeze() -> None:
    now_s = 100.0
    lease = Lease(lambda: now_s)
    lease.begins()
    lease.lost()
    now_s += 1000
    assert lease.steady_until() == float("inf")
    lease.freeze_for(60)
    assert lease.steady_until() == now_s + 60
    assert lease.frozen()
    now_s += 60
    assert not lease.frozen()
    assert lease.steady_until() == float("inf")


def test_the_silence_of_a_busy_engine_adds_up_over_idle_times() -> None:
    """A control plane that hangs loses its lease although the engine is never busy for as long as a lease, however long
    the engine is idle in between, and whether or not an idle engine reports something."""
    now_s = 0.0
    lease = Lease(lambda: now_s)
    lease.found()
    lease.answers_soon = True
    silences = []
    for idle_s, reports, new_stream in ((1.0, 0, 0), (3600.0, 0, 1), (3600.0, 1, 0), (1.0, 0, 0)):
        lease.begins()
        if new_stream:
            lease.lost()
            lease.found()
        lease.asks(now_s)
        now_s += 10.0
        silences.append((lease.silent_s(), lease.state, bool(lease.over(lease.silent_s()))))
        lease.falls_idle()
        assert (lease.silent_s(), lease.state) == (0.0, agent_pb2.AGENT_STATE_READY)
        now_s += idle_s / 2
        if reports:
            lease.asks(now_s)
            lease.falls_idle()
        now_s += idle_s / 2
    stale, degraded = agent_pb2.AGENT_STATE_STALE, agent_pb2.AGENT_STATE_DEGRADED
    assert silences == [(10.0, stale, False), (20.0, stale, False), (30.0, stale, False), (40.0, degraded, True)]
    lease.begins()
    lease.heard()
    assert (lease.silent_s(), lease.state) == (0.0, agent_pb2.AGENT_STATE_READY)


def test_what_an_idle_engine_reports_last_waits_only_while_the_engine_is_busy() -> None:
    """An answer that names an older report leaves the last one waiting; the silence begins with the next report, or
    with the end of the stream."""
    for ends in (False, True):
        now_s = 0.0
        lease = Lease(lambda: now_s)  # noqa: B023
        lease.found()
        lease.begins()
        now_s = 10.0
        lease.falls_idle()
        now_s = 7200.0
        lease.heard(9.0)
        if ends:
            lease.lost()
        else:
            lease.begins()
            lease.asks(now_s)
        assert lease.silent_s() == 1.0
        assert lease.over(lease.silent_s()) == 0
        lease.begins()
        now_s += 30.0
        assert lease.over(lease.silent_s()) == ALL_BUT_CAPS


@pytest.mark.parametrize("lost", [False, True])
def test_a_silence_goes_on_with_the_next_report(lost: bool) -> None:
    """A request that no step follows, such as one on a paused engine, asks nothing that could be answered. A report, or
    the end of the stream, adds to the silence before."""
    now_s = 0.0
    lease = Lease(lambda: now_s)
    lease.found()
    lease.begins()
    lease.asks(0.5)
    now_s = 1.0
    lease.falls_idle()
    now_s = 100.0
    lease.begins()
    assert lease.steady_until() == 129.5
    now_s = 131.0
    assert (lease.silent_s(), lease.over(lease.unheard_s())) == (0.0, 0)
    if lost:
        lease.lost()
    else:
        lease.asks(now_s)
    assert lease.silent_s() == 0.5


def test_an_answer_to_a_report_from_before_an_idle_time_leaves_that_time_out() -> None:
    now_s = 0.0
    lease = Lease(lambda: now_s)
    lease.found()
    lease.begins()
    lease.asks(0.25)
    now_s = 1.0
    lease.falls_idle()
    now_s = 39.0
    lease.begins()
    now_s = 40.0
    lease.heard(0.5)
    assert lease.silent_s() == lease.unheard_s() == 1.5
