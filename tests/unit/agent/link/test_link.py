"""Messages that the link hands to the engine's thread, without the link's own thread and without a stream."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from meridian.v1 import agent_pb2, agent_pb2_grpc

from meridian_agent.core.bad_settings import BadSettings
from meridian_agent.core.sentences import NO_SENTENCES, NO_STATES
from meridian_agent.core.step_record import Gauges, StepRecord
from meridian_agent.link.control_stream import MIN_HEARTBEAT_S, REFUSED, REFUSED_S, ControlStream


def link_of(idle: bool) -> ControlStream:
    made = ControlStream(["nowhere:1"], agent_pb2.Hello, lambda _: None, lambda _: None, clock=lambda: 1.0)
    made.lease.idle = idle
    return made


def hear(link: ControlStream, step: int, **decisions: Any) -> None:
    directives = agent_pb2.Directives(step=step, **decisions)
    link._receive(agent_pb2.ConnectResponse(directives=directives))


def test_an_answer_that_decides_nothing_is_only_a_number() -> None:
    link = link_of(idle=False)
    hear(link, 7)
    assert (link.inbox.answered_step, len(link.inbox.messages)) == (7, 0)


def test_what_came_before_is_taken_in_first() -> None:
    """A request that waits for an answer must not go on before earlier decisions are in force."""
    link = link_of(idle=False)
    hear(link, 7, forces=[agent_pb2.ForceEnd(decision_id=1)])
    hear(link, 8)
    assert link.inbox.answered_step == 0
    assert [message.step for message in link.inbox.messages if message] == [7, 8]
    link.inbox.messages.clear()
    hear(link, 9)
    assert link.inbox.answered_step == 9


def test_each_kind_of_decision_is_handed_over() -> None:
    for decisions in (
        {"forces": [agent_pb2.ForceEnd()]},
        {"caps": [agent_pb2.ThinkCap()]},
        {"tiers": [agent_pb2.TierChange()]},
        {"probes": [agent_pb2.EatProbe()]},
        {"plan": agent_pb2.DispatchPlan()},
    ):
        for step in (0, 3):
            link = link_of(idle=False)
            hear(link, step, **decisions)
            assert len(link.inbox.messages) == 1, decisions


def refusing(error: Exception, now_s: list[float]) -> ControlStream:
    """Return a link whose engine cannot obey any settings."""

    def prepare(_: agent_pb2.Settings) -> None:
        raise error

    return ControlStream(["nowhere:1"], agent_pb2.Hello, prepare, lambda _: None, clock=lambda: now_s[0])


def send(link: ControlStream, revision: int) -> None:
    settings = agent_pb2.Settings(revision=revision, nonce=1, lease_ms=30_000)
    link._receive(agent_pb2.ConnectResponse(settings=settings))


def test_the_newest_refusals_are_remembered_for_a_while() -> None:
    """Another control plane may have another revision with the same number. One with another store counts revisions
    from 1, so a low number may be the newest refusal."""
    now_s = [1.0]
    link = refusing(BadSettings("no such marker"), now_s)
    send(link, 7)
    assert (link.refused, link.lease.revision) == ({7: "no such marker"}, 0)
    for revision in (*range(100, 100 + REFUSED), 3, 101):
        send(link, revision)
    assert sorted(link.refused) == [3, *range(101, 100 + REFUSED)]
    now_s[0] += REFUSED_S
    assert link.refused == {}


def test_a_long_refusal_is_cut() -> None:
    """Each Hello names the refusal, and the control plane accepts no Hello over 64 KiB, so a long text would lock the
    agent out for ten minutes."""
    link = refusing(KeyError("no such token in" + 100_000 * " this"), [1.0])
    send(link, 7)
    status: Any = link.outbox.ring.get_nowait()
    error = status.settings_status.error
    assert error == link.refused[7]
    assert error.startswith("KeyError: 'no such token in this")
    assert REFUSED * len(error) < 32 << 10


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"lease_ms": 99}, "lease_ms must be at least 100; got 99"),
        ({"measured_share": 2.0}, "measured_share must be in [0, 1]; got 2"),
        ({"measured_share": math.nan}, "measured_share must be in [0, 1]; got nan"),
        ({"client_slo_classes": ["*"] * 65}, "client_slo_classes must have at most 64 globs; got 65"),
        ({"client_slo_classes": ["x", "*" * 257]}, "client_slo_classes must have at most 256 characters each; got 257"),
        ({"closing_text": "x" * 2001}, "closing_text must have at most 2000 characters; got 2001"),
        ({"answer_only_stops": "x" * 2001}, "answer_only_stops must have at most 2000 characters; got 2001"),
        ({"measured_share": 1.0, "client_slo_classes": ["x" * 256] * 64}, ""),
    ],
)
def test_settings_that_no_control_plane_sends_are_refused(own: dict[str, Any], said: str) -> None:
    link = link_of(idle=False)
    settings = agent_pb2.Settings(**{"revision": 7, "nonce": 1, "lease_ms": 30_000, **own})
    link._receive(agent_pb2.ConnectResponse(settings=settings))
    refused = link.outbox.ring.get_nowait() if link.outbox.ring.qsize() else None
    assert (refused.settings_status.error if refused else "") == said  # type: ignore[union-attr]


@pytest.mark.parametrize(("heartbeat_ms", "heartbeat_s"), [(0, 0.0), (1, MIN_HEARTBEAT_S), (3000, 3.0)])
def test_what_a_control_plane_says_neither_busies_the_link_nor_fills_the_log(
    heartbeat_ms: int, heartbeat_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    link = link_of(idle=False)
    link._receive(agent_pb2.ConnectResponse(welcome=agent_pb2.Welcome(heartbeat_ms=heartbeat_ms)))
    assert link.outbox.heartbeat_s == heartbeat_s
    caplog.set_level(logging.INFO, "vllm.meridian")
    link._receive(agent_pb2.ConnectResponse(freeze=agent_pb2.Freeze(remaining_ms=1000, reason="x" * 100_000)))
    link._receive(agent_pb2.ConnectResponse(going_away=agent_pb2.GoingAway(reason="x" * 100_000)))
    assert [len(line.message) > 5000 for line in caplog.records if "xxx" in line.message] == [False] * 2


@pytest.mark.parametrize(("length", "kept"), [(256, True), (257, False)])
def test_snapshots_repeat_no_long_id_of_a_session(length: int, kept: bool) -> None:
    link, said = link_of(idle=False), "x" * length
    link._receive(agent_pb2.ConnectResponse(welcome=agent_pb2.Welcome(session_id=said)))
    assert link.outbox.unreported.session_id == (said if kept else "")


def test_an_engine_at_rest_is_handed_the_newest_settings_only() -> None:
    """An engine without live requests, or with its agent off, gets only the newest settings."""
    for link in (link_of(idle=True), link_of(idle=False)):
        link.step_aside()
        for revision in range(1, 1000):
            settings = agent_pb2.Settings(revision=revision, nonce=revision, lease_ms=30_000)
            link._receive(agent_pb2.ConnectResponse(settings=settings))
            link.outbox.ring.get_nowait()
        assert (len(link.mailbox.arrived), link.lease.revision) == (0, 999)


class FakeCall:
    """A stream on which no message arrives. `began` says whether the stream was cancelled before the link listened to
    it."""

    def __init__(self) -> None:
        self.cancelled, self.began = False, False

    def cancel(self) -> None:
        self.cancelled = True

    def __iter__(self) -> FakeCall:
        self.began = self.cancelled
        return self

    def __next__(self) -> agent_pb2.ConnectResponse:
        raise grpc.RpcError


def stream_of(
    link: ControlStream, monkeypatch: pytest.MonkeyPatch, after_hello: Callable[[], None] = lambda: None
) -> FakeCall:
    """Run one stream of the link, from its Hello to its end."""
    call = FakeCall()

    def connect(messages: Iterator[agent_pb2.ConnectRequest], **_: Any) -> FakeCall:
        next(messages)
        after_hello()
        return call

    monkeypatch.setattr(agent_pb2_grpc, "AgentServiceStub", lambda _: SimpleNamespace(Connect=connect))
    link._stream("nowhere:1", 10.0)
    return call


def test_a_stream_whose_hello_is_not_true_any_more_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The link ends such a stream: otherwise a fault at that moment would stay unreported, or a cleared fault stay
    reported, until the stream ends."""
    link = link_of(idle=False)
    assert not stream_of(link, monkeypatch).began
    assert stream_of(link, monkeypatch, link.step_aside).began
    assert not stream_of(link, monkeypatch).began


def test_whoever_takes_what_is_sent_is_told_of_an_end_without_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sending thread must learn of the stream's end; otherwise it would wait for messages for ever, and each
    attempt would leave another such thread."""

    def no_thread(_: object) -> None:
        raise RuntimeError("can't start new thread")

    link = link_of(idle=False)
    monkeypatch.setattr(threading.Timer, "start", no_thread)
    with pytest.raises(RuntimeError, match="new thread"):
        stream_of(link, monkeypatch)
    assert link.outbox.ring.qsize() == 1
    assert link.outbox.ring.get_nowait() is None


def test_only_the_answer_to_a_report_tells_how_long_it_took() -> None:
    """An answer to a status also names the newest report, however long ago that report was sent."""
    now_s = [1.0]
    link = ControlStream(["nowhere:1"], agent_pb2.Hello, lambda _: None, lambda _: None, clock=lambda: now_s[0])
    link.lease.begins()
    link.lease.found()
    sent = link.outbox.messages(link.outbox.ring, agent_pb2.Hello)
    next(sent)

    def report(step: int) -> None:
        link.outbox.send(StepRecord(step=step, urgent=True), list)
        while next(sent).step.step != step:
            pass

    def answer(step: int, after_s: float) -> float:
        now_s[0] += after_s
        hear(link, step)
        return link.outbox.round_trip_ms

    report(7)
    assert answer(7, 0.5) == pytest.approx(500)
    assert answer(7, 3600) == pytest.approx(500)
    report(8)
    link.outbox.ring.put(agent_pb2.ConnectRequest(settings_status=agent_pb2.SettingsStatus(nonce=1)))
    next(sent)
    assert answer(8, 3600) == pytest.approx(500)
    report(9)
    assert answer(9, 0.25) == pytest.approx(250)


@pytest.mark.parametrize("between", ["nothing", "other numbers", "a step of text", "a new stream"])
def test_a_step_of_nothing_is_told_unless_its_numbers_are_those_told_last(between: str) -> None:
    """The engine stands still after it; numbers told earlier would count until the next request."""
    outbox = (link := link_of(idle=False)).outbox
    link.lease.connected = True

    def of_nothing(kv_used: float) -> StepRecord:
        return StepRecord(state=agent_pb2.AGENT_STATE_READY, gauges=Gauges(kv_used, 0, 0))

    outbox.send(of_nothing(0.0), list)
    assert outbox.says_nothing_new(of_nothing(0.0), is_live=False)
    if between == "other numbers":
        outbox.send(of_nothing(0.5), list)
    elif between == "a step of text":
        step: Any = [1, 1.0, 5.0, 0, 1, [], [], [], [], NO_SENTENCES, NO_STATES, None, ()]
        assert outbox.send_text(tuple(step))
    elif between == "a new stream":
        outbox.new_ring()
    assert outbox.says_nothing_new(of_nothing(0.0), is_live=False) == (between == "nothing")
