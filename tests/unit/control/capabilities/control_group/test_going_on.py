"""Requests that run while their stream ends: they count in the saving once the engine process has its next stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
from meridian.v1 import agent_pb2, fleet_pb2

from meridian_agent.core.tracker import RESTING_SLOTS
from meridian_control.capabilities.control_group.fleet import Comparisons
from meridian_control.capabilities.listed import CAPABILITIES
from meridian_control.fleet import left_behind
from meridian_control.fleet.connection import Connection
from meridian_control.fleet.fleet import Fleet
from meridian_control.policy.model import Policy
from tests.fakes.agent import Script, StreamChecker, hello
from tests.fakes.tables import policy
from tests.unit.control.capabilities.control_group.test_stream import CONTROL, HALF, OTHER, RULES, TREATED
from tests.unit.sessions import EARLY, Stream, freezes, thaws

# Tokens of both requests; and how long after the end of its stream an engine is governed no more.
THINK, ANSWER, TOO_LATE = 60, 4, timedelta(seconds=31)
CAP = THINK + 20
CAPPED = policy(scheduler={**EARLY, "max_think_tokens": CAP}, entropy={**RULES, "holdout_share": 0.5})


@dataclass
class Engine(Stream):
    """An engine that is connected to a replica, and can connect to it again."""

    fleet: Fleet = field(init=False)
    connection: Connection = field(init=False)

    def __post_init__(self) -> None:
        self.fleet = Fleet(lambda: self.now, capabilities=CAPABILITIES)
        super().__post_init__()
        self.connection = self.fleet.join(self.hello)
        self.session = self.connection.session

    def end_stream(self) -> None:
        self.fleet.leave(self.connection, "disconnected")

    def connect(
        self, under: Policy | None = None, *, policy_first: bool = False, between: int = 0, **fields: Any
    ) -> None:
        """Begin another stream. under: its policy, HALF if absent. policy_first: whether the agent confirms that before
        it sends its snapshot. between: steps that it makes between its snapshot and the confirmation."""
        self.connection = self.fleet.join(hello(**fields))
        self.session, self.agent.checker, self.agent.outbox = self.connection.session, StreamChecker(), []
        self.agent.engine.directives.new_stream()
        self.agent.receive(agent_pb2.ConnectResponse(welcome=agent_pb2.Welcome(session_id="t")))
        if policy_first:
            self.apply(under or HALF)
        self.revision += not policy_first
        if not policy_first:
            self.deliver(self.session.on_policy(self.revision, under or HALF))
        confirmed = self.agent.heard()
        self.agent.say(snapshot=self.agent.snapshot())
        for _ in range(between):
            self.agent.step()
        self.pump()
        self.agent.outbox = confirmed
        self.pump()

    def free_slots(self) -> None:
        """Let all requests end, and the engine give their slots to the next ones."""
        for filler in range(1000, 1000 + RESTING_SLOTS):
            self.open(str(filler))
        for name in [*self.agent.engine.live]:
            self.agent.abort(name)
            if self.connection in self.fleet.connections:
                self.step()
            else:
                self.agent.step()

    @property
    def counts(self) -> fleet_pb2.Savings:
        return self.fleet.part(Comparisons).experiments.total()

    @property
    def arms(self) -> list[tuple[int, int]]:
        """Requests and thinking tokens of the treated arm and of the control group."""
        counts = self.counts
        return [(arm.requests, arm.think_tokens) for arm in (counts.treated, counts.control)]


def two_requests(
    steps: int, answer: int = ANSWER, *, under: Policy = HALF, eat_nats: float = 3.0, **script: int
) -> Engine:
    """Begin one request of each arm and make some steps. eat_nats: below 0.1 a rule ends thinking."""
    made = Engine()
    made.apply(under)
    made.agent.eat_nats = eat_nats
    for name in (TREATED, CONTROL):
        made.open(name, think=THINK, answer=answer, **script)
    made.step(steps)
    return made


def another_ends(made: Engine) -> list[int]:
    """Run a later request of the control group to its end; return how many of each arm count, so that none waits."""
    made.now += timedelta(minutes=1)
    made.open(CONTROL, think=5, answer=1)
    made.step(20)
    return [requests for requests, _ in made.arms]


@pytest.mark.parametrize("policy_first", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 20, THINK - 1, THINK, THINK + 3])
def test_requests_count_whole_although_their_stream_ends(steps: int, policy_first: bool) -> None:
    made = two_requests(steps)
    made.end_stream()
    made.connect(policy_first=policy_first)
    assert made.arms == [(0, 0), (0, 0)]
    made.step(THINK + ANSWER + 5)
    assert made.arms == [(1, THINK), (1, THINK)]
    counts = made.counts
    assert [arm.answers for arm in (counts.treated, counts.control)] == [1, 1]
    assert [arm.answer_tokens for arm in (counts.treated, counts.control)] == [ANSWER, ANSWER]
    # What a rule would have read was not seen whole, unless the requests had only waited.
    assert counts.judged == (steps == 0)


def test_requests_count_that_outlive_several_streams() -> None:
    made = two_requests(10)
    for _ in range(3):
        made.end_stream()
        made.connect()
        made.step(10)
    made.step(THINK)
    assert made.arms == [(1, THINK), (1, THINK)]


@pytest.mark.parametrize("steps", range(8, 40, 4))
def test_what_shortening_did_before_the_end_of_the_stream_counts(steps: int) -> None:
    """The rule ends the thinking of the treated request in the first stream, or in the second."""
    whole, broken = two_requests(steps, THINK, eat_nats=0.01), two_requests(steps, THINK, eat_nats=0.01)
    is_early = whole.session.totals.ends["eat"] == 1
    broken.end_stream()
    broken.connect()
    for made in (whole, broken):
        made.step(2 * THINK)
    counts, wanted = broken.counts, whole.counts
    assert counts.treated.stopped == counts.control.stopped == 1
    assert counts.treated.think_tokens < counts.control.think_tokens == THINK
    # The second stream samples anew, unless the rule has fired before.
    if is_early:
        assert counts.treated == wanted.treated
        assert counts.shadow_saved_tokens == wanted.shadow_saved_tokens
    assert (wanted.judged, wanted.forced_ends.ends, wanted.natural_ends.ends) == (1, 1, 1)
    assert (counts.judged, counts.forced_ends.ends, counts.natural_ends.ends) == (0, 0, 0)


def test_requests_count_if_the_older_stream_has_not_been_found_to_have_ended() -> None:
    made = two_requests(20)
    older = made.connection
    made.connect()
    made.fleet.leave(older, "replaced")
    made.step(THINK)
    assert made.arms == [(1, THINK), (1, THINK)]


# Events between the two streams, or in the second one's Hello, by what they are called.
BREAKS: dict[str, Callable[[Engine], Any]] = {
    "the lease ran out": lambda made: setattr(made, "now", made.now + TOO_LATE),
    "the engine started anew": lambda made: made.connect(incarnation="2"),
    "the engine is frozen": lambda made: made.connect(freeze=agent_pb2.FreezeStatus(frozen=True)),
    "its thinking ended": lambda made: [made.agent.step() for _ in range(THINK - 18)],
    "it ended": lambda made: [made.agent.step() for _ in range(THINK + ANSWER + 1)],
}


@pytest.mark.parametrize("happened", BREAKS)
def test_requests_do_not_count_of_which_it_is_not_known_what_governed_them(happened: str) -> None:
    made = two_requests(20)
    made.end_stream()
    BREAKS[happened](made)
    if made.connection not in made.fleet.connections:
        made.connect()
    made.step(THINK + ANSWER + 5)
    assert made.arms == [(0, 0), (0, 0)]
    made.end_stream()
    made.connect()
    assert another_ends(made) == [0, 1]


@pytest.mark.parametrize(("steps", "is_known"), [(3, True), (THINK - 18, False)])
def test_thinking_that_ends_before_the_policy_is_in_force_is_not_counted(steps: int, is_known: bool) -> None:
    made = two_requests(20)
    made.end_stream()
    made.connect(between=steps)
    made.step(THINK + ANSWER)
    assert made.arms == ([(1, THINK)] * 2 if is_known else [(0, 0)] * 2)
    assert another_ends(made) == [int(is_known), 1 + is_known]


@pytest.mark.parametrize("in_one_stream", [False, True])
def test_requests_of_a_frozen_engine_do_not_count(in_one_stream: bool) -> None:
    made = two_requests(20)
    freezes(made)
    if in_one_stream:
        thaws(made)
    else:
        made.end_stream()
        made.connect()
    made.step(THINK + ANSWER + 5)
    assert made.arms == [(0, 0), (0, 0)]


def test_requests_count_although_reports_were_lost() -> None:
    made = two_requests(20)
    for _ in range(5):
        made.agent.step()
    made.agent.outbox = []
    made.agent.say(snapshot=made.agent.snapshot())
    made.step(THINK)
    assert made.arms == [(1, THINK), (1, THINK)]


def test_requests_do_not_count_under_other_rules() -> None:
    made = two_requests(20)
    made.end_stream()
    made.connect(OTHER)
    made.step(THINK + ANSWER + 5)
    assert another_ends(made) == [0, 1]


def test_rules_that_change_later_end_the_counting() -> None:
    made = two_requests(20)
    made.end_stream()
    made.connect()
    made.step(5)
    made.apply(OTHER)
    made.step(THINK + ANSWER + 5)
    assert another_ends(made) == [0, 1]


@pytest.mark.parametrize(("name", "think"), [("2001", 25), (CONTROL, 10)])
def test_another_request_in_the_slot_does_not_count_as_the_one_before(name: str, think: int) -> None:
    """It may even have the same id."""
    made = two_requests(20)
    made.end_stream()
    made.free_slots()
    assert {made.open(each, think=30, answer=ANSWER) for each in ("2000", name)} == {0, 1}
    for _ in range(think):
        made.agent.step()
    made.connect()
    made.step(THINK)
    assert made.arms == [(0, 0), (0, 0)]
    assert another_ends(made) == [0, 1]


def test_a_request_that_has_only_waited_is_judged() -> None:
    made = Engine()
    made.apply(HALF)
    made.agent.eat_nats, made.agent.places = 3.0, 1
    for name in (TREATED, CONTROL):
        made.open(name, think=THINK, answer=ANSWER)
    made.step(5)
    made.end_stream()
    made.connect()
    made.step(2 * (THINK + ANSWER))
    assert made.arms == [(1, THINK), (1, THINK)]
    assert made.counts.judged == 1


@pytest.mark.parametrize("breaks", [1, 2])
@pytest.mark.parametrize("again", [3, 12])
def test_thinking_that_begins_again_counts_as_such(again: int, breaks: int) -> None:
    """The rule ends the thinking of the treated request in the first stream; it begins again in the same stream or in
    the last one, where it is not ended first."""
    whole, broken = (two_requests(20, 200, eat_nats=0.01, rethink_at=again) for _ in range(2))
    for _ in range(breaks):
        broken.end_stream()
        broken.connect()
    for made in (whole, broken):
        made.agent.eat_nats = 3.0
        made.step(400)
    counts, wanted = broken.counts, whole.counts
    assert wanted.treated.reentries == 1
    assert (counts.treated.reentries, counts.control.reentries) == (1, 0)
    assert (counts.treated.stopped, counts.control.stopped) == (1, 1)
    assert counts.treated.think_tokens == wanted.treated.think_tokens


# Steps until the end of the stream from the first answer on, in which it ends, in the second thinking, or in the second
# answer.
@pytest.mark.parametrize("steps", [3, 15, 60])
@pytest.mark.parametrize("breaks", [1, 2])
def test_the_end_of_a_second_thinking_is_not_taken_for_the_first(steps: int, breaks: int) -> None:
    """The model itself has ended the first one, and the cap ends the second one."""
    made = two_requests(THINK + 2, 200, under=CAPPED)
    made.agent.scripts[TREATED] = Script(CAP, 200, rethink_at=10)
    made.step(steps)
    for _ in range(breaks):
        made.end_stream()
        made.connect(CAPPED)
    made.step(400)
    treated = made.counts.treated
    assert (treated.requests, treated.reentries, treated.stopped, treated.think_tokens) == (1, 1, 0, CAP)


async def test_requests_of_an_engine_that_does_not_come_back_keep_none_from_counting() -> None:
    made = two_requests(20)
    made.end_stream()
    comparisons = made.fleet.part(Comparisons)
    for seconds in (left_behind.KEPT_S, 1):
        assert comparisons._left._left
        made.now += timedelta(seconds=seconds)
        await comparisons.tick()
    assert not comparisons._left._left
    made.agent.engine.live.clear()
    made.connect(engine_id="another")
    assert another_ends(made) == [0, 1]


@pytest.mark.parametrize("is_off", [False, True])
def test_requests_of_a_stream_that_brings_no_snapshot_keep_none_from_counting(is_off: bool) -> None:
    """The stream ends before its snapshot, or the agent is off."""
    made = two_requests(20)
    made.end_stream()
    joined = made.fleet.join(hello(fault="an error" if is_off else ""))
    if not is_off:
        made.fleet.leave(joined, "disconnected")
    assert not made.fleet.part(Comparisons)._left._left
    made.agent.engine.live.clear()
    made.connect(engine_id="another")
    assert another_ends(made) == [0, 1]


def test_few_requests_are_kept_between_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(left_behind, "MAX_ENTRIES", 1)
    made = two_requests(20)
    made.end_stream()
    assert not made.fleet.part(Comparisons)._left._left
    made.connect()
    made.step(THINK)
    assert another_ends(made) == [0, 1]
