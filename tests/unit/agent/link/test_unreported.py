"""A snapshot says the thinking tokens that no stream has brought, also those of requests that have ended: each once,
whatever streams break. The test plays the link's thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from meridian.v1 import agent_pb2

from meridian_agent.core.phases import Markers
from meridian_agent.core.sentences import NO_SENTENCES, NO_STATES, States
from meridian_agent.core.step_record import StepRecord
from meridian_agent.link import outbox, unreported
from meridian_agent.link.message_sizes import SnapshotRecord
from meridian_agent.link.unreported import MAX_GROUPS, OTHER, SILENT_S
from tests.fakes.engine import START, TEXT, FakeEngine
from tests.fakes.linked import LinkedEngine


class Engine(LinkedEngine):
    """An engine whose streams the test begins and ends."""

    def __init__(self) -> None:
        self.now_s, self.sessions = 1.0, 0
        super().__init__(["nowhere:1"], clock=lambda: self.now_s)

    def connect(self) -> None:
        self.sessions += 1
        self.link.outbox.new_ring()
        self.link._receive(agent_pb2.ConnectResponse(welcome=agent_pb2.Welcome(session_id=f"s{self.sessions}")))

    def lose(self) -> None:
        self.link.mailbox.lose_stream()

    def hear(self, step: int | None = None) -> None:
        """Answer all that was sent so far, or up to a step."""
        directives = agent_pb2.Directives(step=self.engine.step if step is None else step)
        self.link._receive(agent_pb2.ConnectResponse(directives=directives))

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def snapshots(self) -> list[agent_pb2.Snapshot]:
        """Return the snapshots of the newest stream, and take out all that waits."""
        ring, found = self.link.outbox.ring, []
        while ring.qsize():
            item: Any = ring.get_nowait()
            item = item.whole(1 << 30)[0] if isinstance(item, SnapshotRecord) else item
            if isinstance(item, agent_pb2.ConnectRequest) and item.HasField("snapshot"):
                found.append(item.snapshot)
        return found

    def told(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return what the newest stream's only snapshot says: of live requests by id, and of ended ones by tenant."""
        (snapshot,) = self.snapshots()
        live = {opened.request_id: opened.unreported_think_tokens for opened in snapshot.requests}
        return live, {ended.tenant: ended.think_tokens for ended in snapshot.ended}


def connected(*names: str) -> Engine:
    """Return an engine on its first stream, which has brought a token of each request."""
    made = Engine()
    made.connect()
    for name in names:
        made.open(name)
    made.step()
    made.hear()
    made.snapshots()
    return made


# An engine on its first stream, which has brought a token of each of its requests; and a stream of which b has ended
# after two tokens that no stream has brought.
FIRST, SECOND = "connect >a >b >c +1 hear", "connect >a >b >c +1 hear lose +2 -b connect +1 mark"
# Each story tells the events: `>a` a request arrives, `>a!` one that answers at once, `>a?` one that the agent sees
# arrive, `-a` it ends between two steps, `-a!` in a step, with a token, `*a` it is read again and has 100 more thinking
# tokens, `+3` three steps, `quiet` no answer for too long, `mark` the step whose number `hear mark` answers, `hear-any`
# an answer that names a step far ahead. The tokens that the newest stream's snapshot says of live requests follow, and
# those of ended ones.
STORIES: dict[str, tuple[str, dict[str, int], int]] = {
    "before the first stream": (">a +3 connect >b +1", {"a": 4, "b": 1}, 0),
    # The report after the snapshot brings a request that has arrived in its step.
    "an arrival at a snapshot": (">a +3 connect >b? +1", {"a": 4}, 0),
    "an arrival at a snapshot that says nothing": ("connect >a? +1 lose +1 connect +1", {"a": 2}, 0),
    "an arrival at a snapshot that was not answered": (
        ">a +3 connect >b? +1 lose +1 connect +1",
        {"a": 6, "b": 3},
        0,
    ),
    "an arrival at a snapshot that was answered": (
        ">a +3 connect >b? +1 hear lose +1 connect +1",
        {"a": 2, "b": 2},
        0,
    ),
    "without a stream": (f"{FIRST} +10 lose +2 -b >d +3 -d connect +1", {"a": 6, "c": 6}, 5),
    "one that ends in the first step without a stream": (f"{FIRST} lose -b! connect +1", {"a": 2, "c": 2}, 1),
    "one that ends in the first step of the next stream": (f"{FIRST} lose connect -b!", {"a": 1, "c": 1}, 1),
    "one that ends in a step that is brought": (f"{FIRST} -b! +1 lose connect +1", {"a": 1, "c": 1}, 0),
    "one that ends in the step of a silence": (f"{FIRST} +1 quiet -b! lose +1 connect +1", {"a": 3, "c": 3}, 1),
    "one that ends in a silent step that is answered": (
        f"{FIRST} +1 quiet -b! hear +1 lose connect +1",
        {"a": 1, "c": 1},
        0,
    ),
    "a stream that breaks between two steps": (f"{FIRST} +5 lose connect +1", {"a": 1, "b": 1, "c": 1}, 0),
    "the snapshot of the next stream": (SECOND, {"a": 3, "c": 3}, 2),
    # An answer shows that the snapshot has arrived.
    "a snapshot that was answered": (f"{SECOND} -c +4 hear mark lose +1 connect +1", {"a": 2}, 0),
    "a snapshot that was not answered": (f"{SECOND} -c +4 lose +1 connect +1", {"a": 9}, 5),
    "a step that was never reached, on an earlier stream": (
        f"{FIRST} hear-any lose +2 -b connect +1 -c +4 lose +1 connect +1",
        {"a": 9},
        5,
    ),
    "a snapshot that says nothing": ("connect >b! +1 >a +5 lose +1 connect +1", {"b": 0, "a": 2}, 0),
    # A machine that dies ends no connection, so the engine goes on sending until its lease or a keepalive ends.
    "a stream that falls silent": (f"{FIRST} +5 quiet +1 -b +1 lose +1 connect +1", {"a": 4, "c": 4}, 1),
    "a stream that is heard again": (f"{FIRST} +5 quiet +1 -b +1 hear +1 lose +1 connect +1", {"a": 2, "c": 2}, 0),
    # The link sends the snapshot of an idle engine at once, and the stream needs no other.
    "an engine that falls idle": ("connect >a +1 hear lose +3 -a +1 connect", {}, 3),
    # What reading a request again finds is brought by a snapshot, and by nothing before it.
    "a request that was read again": (f"{FIRST} *b +1 lose +1 connect +1", {"a": 2, "b": 102, "c": 2}, 0),
    "one that ends on a stream that is heard": (f"{FIRST} *b -b +1 lose +1 connect +1", {"a": 2, "c": 2}, 100),
    "one that ends without a stream": (f"{FIRST} lose *b +1 -b connect +1", {"a": 2, "c": 2}, 101),
    "one that ends on a stream without an answer": (f"{SECOND} *c -c +1 lose +1 connect +1", {"a": 6}, 105),
    "after an idle time": ("connect >a +1 hear lose +3 -a +1 connect hear >b +1 lose +1 connect +1", {"b": 2}, 0),
}


def play(engine: Engine, story: str) -> None:
    marked = 0
    for event in story.replace("hear mark", "hear-mark").split():
        if event[0] == ">":
            queued_s = engine.now_s if event.endswith("?") else None
            engine.open(event[1], prompt=[TEXT] if event.endswith("!") else [START], queued_s=queued_s)
            engine.engine.join(engine.engine.live[event[1]], engine.now_s)
        elif event.endswith("!") and event[0] == "-":
            engine.take_inbox()
            engine.engine.schedule()
            engine.engine.mask()
            for name in list(engine.engine.live):
                engine.engine.feed(name, [TEXT])
            engine.engine.finish(event[1])
            engine.send(engine.engine.take())
        elif event[0] == "-":
            engine.engine.finish(event[1])
        elif event[0] == "+":
            engine.steps(int(event[1:]))
        elif event[0] == "*":
            live = engine.engine.live[event[1]]
            live.state.think_tokens += 100
            engine.link.outbox.unreported.reread(live, 100)
        elif event == "quiet":
            engine.now_s += SILENT_S + 0.1
        elif event == "mark":
            marked = engine.engine.step
        elif event == "hear-any":
            engine.hear(1 << 40)
        elif event == "hear-mark":
            engine.hear(marked)
        else:
            {"connect": engine.connect, "lose": engine.lose, "hear": engine.hear}[event]()


@pytest.mark.parametrize(("story", "live", "ended"), STORIES.values(), ids=STORIES)
def test_what_no_stream_has_brought(story: str, live: dict[str, int], ended: int) -> None:
    engine = Engine()
    play(engine, story)
    assert engine.told() == (live, {"tenant": ended} if ended else {})


def test_nothing_is_noted_while_a_stream_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    made = connected("a", "b")

    def counted(_: StepRecord) -> None:
        raise AssertionError("a step's tokens were counted")

    monkeypatch.setattr(StepRecord, "think_tokens", counted)
    made.steps(10)
    made.engine.finish("b")
    made.step()
    assert made.engine.live["a"].told_think_tokens == 0
    assert not made.link.outbox.unreported._ended + made.link.outbox.unreported._said


def test_steps_of_text_notice_silence_too() -> None:
    made = connected("a")
    record = made.engine.run({"a": TEXT})
    # The engine has taken in all messages.
    made.link.lease.give_attention()

    def text(at_s: float) -> bool:
        return made.link.outbox.send_text(
            (record.step, at_s, 0, 0, 0, [], [], [], (), NO_SENTENCES, NO_STATES, None, ())
        )

    assert text(made.now_s)
    assert text(made.now_s + SILENT_S)
    assert not text(made.now_s + SILENT_S + 0.1), "the caller sends a record instead"
    made.hear()
    assert text(made.now_s + SILENT_S + 0.1)


def test_a_full_ring_loses_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control plane knows what the stream brought of requests that it knows, and the snapshot says the others."""
    made = connected("a", "b")
    monkeypatch.setattr(outbox, "RING_RECORDS", 2)
    made.steps(4)
    made.open("c")
    made.engine.finish("b")
    made.step()
    made.snapshots()
    made.step()
    live, ended = made.told()
    assert (live["c"], ended) == (2, {"tenant": 2}), "two of the four steps were queued"


@pytest.mark.parametrize("breaks", [False, True])
def test_a_ring_that_is_full_again_before_an_answer_says_no_token_twice(
    monkeypatch: pytest.MonkeyPatch, breaks: bool
) -> None:
    """The stream brings what it had queued until then, unless it breaks."""
    made = connected("a", "b", "c")
    monkeypatch.setattr(outbox, "RING_RECORDS", 3)
    made.steps(4)
    assert made.link.outbox.reports_dropped == 1
    made.snapshots()
    made.steps(2)
    play(made, "-c!")
    assert made.link.outbox.reports_dropped == 2
    made.engine.finish("b")
    made.step()
    (first,) = made.snapshots()
    assert ([each.unreported_think_tokens for each in first.requests], list(first.ended)) == ([2, 2, 2], [])
    if breaks:
        made.lose()
        made.connect()
    made.step()
    live, ended = made.told()
    assert (live, ended) == ({"a": 6}, {"tenant": 8 if breaks else 2})


def test_another_snapshot_of_the_stream_does_not_say_ended_requests_again() -> None:
    made = Engine()
    play(made, SECOND)
    made.engine.finish("c")
    made.step()
    made.link.outbox.resync()
    made.step()
    first, second = made.snapshots()
    assert ([e.think_tokens for e in first.ended], list(second.ended)) == ([2], [])
    made.lose()
    made.step()
    made.connect()
    made.step()
    assert made.told() == ({"a": 7}, {"tenant": 5}), "the stream was not answered"


def test_groups_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Engine()
    for number in range(MAX_GROUPS + 2):
        made.open(f"r{number}", tenant=f"t{number}", effort="high")
    made.open("prefill", tenant="else", remote_decode=True)
    made.step()
    monkeypatch.setattr(unreported, "MAX_TOKENS", 2)
    for name in list(made.engine.live):
        made.engine.finish(name)
    made.open("a", tenant="t0", effort="high")
    made.steps(3)
    made.engine.finish("a")
    made.open("b")
    made.connect()
    made.step()
    (snapshot,) = made.snapshots()
    counted = {(e.model, e.tenant, e.slo_class, e.effort): e.think_tokens for e in snapshot.ended}
    assert len(counted) == MAX_GROUPS + 1
    assert counted[OTHER] == 2
    assert counted["model", "t0", "slo", "high"] == 2, "bounded, too"
    assert counted["model", "t1", "slo", "high"] == 1
    assert sum(counted.values()) == MAX_GROUPS + 1 + 2


def two_tokens() -> FakeEngine:
    return FakeEngine(Markers(((1,),), ((2, 3),)))


@pytest.mark.parametrize(
    "play",
    [
        lambda engine: engine.feed("a", [TEXT, TEXT, 2]),
        lambda engine: (engine.feed("a", [TEXT, 2]), engine.take(), engine.feed("a", [3, TEXT])),
        lambda engine: engine.feed("a", [2, 3, TEXT, 2, 3, TEXT]),
        lambda engine: engine.feed("a", [2, 3, 1, TEXT]),
    ],
    ids=["text", "a marker begun before", "answers with a marker", "thinks again"],
)
def test_a_record_knows_how_it_changes_the_thinking_tokens(play: Callable[[FakeEngine], None]) -> None:
    engine, changes = two_tokens(), 0
    live = engine.open("a")
    play(engine)
    engine.take()
    changes = sum(record.think_tokens()[live.slot] for record in engine.records)
    assert changes == live.state.think_tokens


def test_a_record_of_the_run_counts_each_draft() -> None:
    record = StepRecord(slots=[3, 5], phases=[2, 3], rows=[0, 1], text=[TEXT] * 5, lengths=[3, 2])
    record.states = States(np.zeros(5, np.uint32))
    assert record.think_tokens() == {3: 3, 5: 0}
