"""A capability of one's own, `tests/primes`, gets in a stream what the rules of the product get."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import pytest
from meridian.v1 import agent_pb2

from meridian_control.capabilities.listed import STREAM_PARTS
from meridian_control.common.opened_request import OpenedRequest
from meridian_control.engine.part import Part, Turn
from meridian_control.engine.part import Stream as PartStream
from meridian_control.engine.shortening import LOWER_CAP, Stages
from meridian_control.journal.records import Detail, Shortening
from meridian_control.policy.model import Policy, Who
from meridian_control.policy.shortening_kinds import Kind, kinds_of, not_measured, warnings, without
from meridian_control.policy.shortening_schema import BudgetPolicy, StagedEntry
from tests.fakes.tables import policy
from tests.primes.capability import ENDS, PRIMES
from tests.unit import sessions
from tests.unit.control.capabilities.control_group.test_harm_by_kind import harm_of
from tests.unit.control.capabilities.control_group.test_stream import CONTROL, TREATED, counts
from tests.unit.sessions import EARLY, Stream, freezes, opens, play, reconnected, stream, thaws

IN_FORCE = {"primes": {"shadow": False, "at_least": 20}}
SHADOWED = {"primes": {"shadow": True, "at_least": 20}}
OTHERS_OFF: dict[str, Any] = {"scheduler": EARLY, "loop": {"enabled": False}}


@pytest.fixture(autouse=True)
def _primes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "STREAM_PARTS", (*STREAM_PARTS, PRIMES.stream))


def under(extension: dict[str, Any], **entropy: Any) -> Policy:
    return policy(**OTHERS_OFF, entropy={"shadow": True, "holdout_share": 0.5, **entropy}, extension=extension)


def forces(made: Stream, name: str) -> list[tuple[str, bool]]:
    """Return the ends of thinking that were decided for a request."""
    decided = [event.decision for event in made.life(name).events if event.decision.kind == "force"]
    return [(decision.reason, decision.shadow) for decision in decided]


@pytest.mark.parametrize("right_from", [1, 90])
def test_its_ends_leave_the_control_group_alone_and_their_harm_is_measured(right_from: int) -> None:
    made = stream(under(IN_FORCE))
    made.agent.eat_nats = 3.0
    for name in (CONTROL, TREATED):
        made.open(name, 120, 3, trial_answer=lambda tokens: int(tokens >= right_from))
    made.step(140)
    assert (forces(made, CONTROL), forces(made, TREATED)) == ([("primes", True)], [("primes", False)])
    assert made.session.totals.ends == {"primes": 1, "primes_shadowed": 1, "natural": 1}
    told, harm = counts(made), harm_of(made, "primes")
    assert (told.control.think_tokens, told.treated.stopped, told.control.stopped) == (120, 1, 1)
    assert (harm.judged_stops, harm.harmful, harm.unjudged) == (1, int(right_from > 23), 0)
    assert (harm.forced_ends.ends, harm.natural_ends.ends) == (1, 1)
    assert made.session.totals.below_cap["primes"] > 0
    assert "primes" in [event.detail for event in made.life(TREATED).events if event.kind == "think_end"]
    assert made.balanced()


def test_in_shadow_it_ends_each_request_once_and_its_saving_is_estimated() -> None:
    made = play(stream(under(SHADOWED)), opens("a", 100, 3), 120)
    assert (forces(made, "a"), made.session.totals.ends) == ([("primes", True)], {"primes_shadowed": 1, "natural": 1})
    assert made.session.totals.counted[ENDS, ()] == 1
    saved = {row.reason: row.saved_tokens for row in made.session.shadow.messages() if row.section == "primes"}
    assert saved == {"": 100 - 23, "primes": 100 - 23}
    assert made.session.totals.shadow_saved["primes", "any"] == 100 - 23


def test_what_was_in_shadow_ends_thinking_once_it_is_in_force() -> None:
    made = play(stream(under(SHADOWED)), opens(TREATED, 100, 3), 40, under(IN_FORCE), 20)
    assert forces(made, TREATED) == [("primes", True), ("primes", False)]
    # The comparison begins again with the rules.
    assert "primes" not in {row.section for row in made.session.shadow.messages()}


def test_one_in_shadow_keeps_no_other_from_ending_thinking(monkeypatch: pytest.MonkeyPatch) -> None:
    class Earlier(Part):
        def __init__(self, stream: PartStream) -> None:
            self._stream = stream

        def ends(self, turn: Turn) -> None:
            for slot in self._stream.table.thinking.nonzero()[0].tolist():
                reason = agent_pb2.FORCE_REASON_EXTENSION
                self._stream.end_thinking(turn, reason, slot, shadow=True, name="earlier")

    monkeypatch.setattr(sessions, "STREAM_PARTS", (*STREAM_PARTS, Earlier, PRIMES.stream))
    made = play(stream(under(IN_FORCE, holdout_share=0.0)), opens("a", 100, 3), 40)
    assert forces(made, "a") == [("earlier", True), ("primes", False)]


def test_it_ends_nothing_below_the_requests_own_floor_nor_a_second_time() -> None:
    made = play(stream(under(IN_FORCE, holdout_share=0.0)), opens("a", 100, 50, min_think_tokens=60, rethink_at=3), 120)
    life = made.life("a")
    assert next(e.think_tokens for e in life.events if e.kind == "think_end") > 60
    assert forces(made, "a") == [("primes", False)]


def test_it_ends_nothing_while_the_answer_would_be_empty() -> None:
    sections = {"scheduler": {**EARLY, "empty_answer_extension_tokens": 9, "max_think_tokens": 60}}
    made = stream(under(IN_FORCE, holdout_share=0.0).model_copy(update={"scheduler": policy(**sections).scheduler}))
    made.agent.empty_answer = True
    play(made, opens("a", 100, 3), 58)
    assert forces(made, "a") == []
    made.agent.empty_answer = False
    made.step(20)
    assert made.session.totals.ends == {"primes": 1}


def test_explain_shows_what_it_compared() -> None:
    made = play(stream(under(IN_FORCE, holdout_share=0.0)), opens("a", 100, 3), 40)
    (decision,) = [event.decision for event in made.life("a").events if event.decision.kind == "force"]
    assert [(row.signal, row.value, row.limit_name, row.limit) for row in decision.comparisons] == [
        ("think_tokens", 23, "extension.primes.at_least", 20)
    ]


@pytest.mark.parametrize("most_nats", [0.0, 1.0])
def test_it_says_whether_each_token_is_measured(most_nats: float) -> None:
    extension = {"primes": {**IN_FORCE["primes"], "most_nats": most_nats}}
    made = stream(policy(**OTHERS_OFF, entropy={"enabled": False}, extension=extension))
    told = made.agent.checker.settings
    assert told is not None
    assert (told.observe_entropy, told.only_sentence_ends) == (most_nats > 0, False)
    assert not told.HasField("measured_share")
    made = stream(policy(**OTHERS_OFF, extension=extension))
    told = made.agent.checker.settings
    assert told is not None
    # The control group belongs to a sample whose requests are chosen one by one.
    assert (told.HasField("measured_share"), told.measured_cluster_requests) == (not most_nats, 0)
    assert (told.merge_openings, told.report_interval_steps) == (False, 1)


def test_it_ends_nothing_while_the_engine_is_frozen() -> None:
    made = play(stream(under(IN_FORCE, holdout_share=0.0)), opens("a", 100, 3), 10, freezes, 30)
    assert forces(made, "a") == []
    play(made, thaws, lambda one: one.agent.say(snapshot=one.agent.snapshot()), 20)
    assert forces(made, "a") == [("primes", False)]


def test_an_operators_end_is_the_only_one() -> None:
    made = play(stream(under(IN_FORCE, holdout_share=0.0)), opens("a", 100, 3), 22)
    made.end("a")
    made.step(20)
    assert forces(made, "a") == [("operator", False)]
    assert made.session.totals.ends == {"operator": 1}


def test_another_stream_goes_on_with_its_end() -> None:
    made = play(stream(under(IN_FORCE, holdout_share=0.0)), opens("a", 100, 3), 23)
    again = reconnected(made, under(IN_FORCE, holdout_share=0.0))
    again.step(20)
    assert again.session.totals.ends == {"primes": 1}


# ------------------------------------------------------------------------------------------------ policies


def test_its_section_is_a_kind_of_shortening() -> None:
    assert kinds_of(under(IN_FORCE)) == [Kind("primes")]
    assert Kind("primes").text == "primes"
    for off in (SHADOWED, {}, {"primes": {"enabled": False}}):
        assert kinds_of(under(off)) == []
    unmeasured = under(IN_FORCE, holdout_share=0.0)
    assert warnings(unmeasured) == [f"harm is not measured: {not_measured(unmeasured)}"]
    assert without(under(IN_FORCE), Kind("primes")) == under(SHADOWED)
    assert without(under({"other": {"a": 1}, **IN_FORCE}), Kind("other")) == under(IN_FORCE)
    assert without(under(IN_FORCE), Kind("gone")) == under(IN_FORCE)


# ------------------------------------------------------------------------------------------------ entries in stages

LATE = BudgetPolicy(name="late", tokens_per_day=1, max_think_tokens=20, shadow=False)


class Curfew(Part):
    """Shortens all requests by the entry of an extension `curfew`."""

    section = "curfew"

    def __init__(self, stream: PartStream) -> None:
        stream.policies.shorteners.append(self)
        self.entries: tuple[StagedEntry, ...] = ()

    def policy_begins(self, revision: int, policy: Policy, now: datetime) -> None:
        self.entries = (LATE,) if self.section in policy.extension else ()

    def assign(self, slot: int, opened: OpenedRequest, who: Who, again: bool) -> Sequence[StagedEntry]:
        return self.entries

    def stages_of(self, slot: int) -> Stages:
        return ((0, LOWER_CAP),)

    def has_shadow(self, slot: int) -> bool:
        return False

    def detail(self, by: Shortening) -> Detail:
        return Detail()


def test_it_may_shorten_requests_in_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "STREAM_PARTS", (*STREAM_PARTS, Curfew))
    made = play(stream(under({"curfew": {}})), opens(CONTROL, 90, 3), opens(TREATED, 90, 3), 100)
    assert made.session.totals.ends == {"hard_cap": 1, "natural": 1}
    (cap,) = [e.decision for e in made.life(TREATED).events if e.decision.kind == "cap"]
    assert (cap.reason, [row.limit_name for row in cap.comparisons]) == ("curfew", ["curfew late in stage lower_cap"])
    ends = {harm.name: (harm.forced_ends.ends, harm.natural_ends.ends) for harm in counts(made).kinds}
    assert ends == {"": (0, 0), "late": (1, 1)}
    assert without(under({"curfew": {}}), Kind("curfew", "late")) == under({})
