"""The lines about an engine's state."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from meridian_agent.core.plain_log import BURST, PlainLog
from meridian_agent.link import lease as lease_module
from meridian_agent.link.lease import Lease

if TYPE_CHECKING:
    import pytest


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
