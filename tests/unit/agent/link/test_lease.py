"""The lines about an engine's state, and the mark that something waits for the engine."""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Any

import pytest
from meridian.v1 import agent_pb2

from meridian_agent.core.plain_log import BURST, PlainLog
from meridian_agent.link import lease as lease_module
from meridian_agent.link.inbox import Inbox
from meridian_agent.link.lease import Lease
from meridian_agent.link.mailbox import Arrived, Mailbox
from meridian_agent.link.record_queue import RecordQueue

if TYPE_CHECKING:
    from collections.abc import Callable


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
