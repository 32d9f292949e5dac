"""A rule sees the same history however steps are merged into reports: single steps against every way to merge them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meridian.v1 import agent_pb2

from meridian_agent.core.phases import FLAG_END, FLAG_GOES_ON, FLAG_MARKER, FLAG_SENTENCE
from meridian_agent.core.request_info import RequestInfo
from meridian_agent.core.step_record import MeasuredProbe, StepRecord
from meridian_agent.core.step_signals import StepSignals
from meridian_agent.link.messages import mergeable, step_report
from meridian_control.capabilities.control_group.stream import ControlGroup
from meridian_control.capabilities.listed import STREAM_PARTS
from meridian_control.engine.request_table import OUTPUT, PROMPT, THINK
from meridian_control.engine.session import Session
from meridian_control.engine.shadow_comparison import Comparison
from meridian_control.journal.journal import Journal
from meridian_control.journal.log import DecisionLog
from meridian_control.journal.messages import compared
from meridian_control.policy.model import Policy
from meridian_control.policy.shortening_kinds import SOFT_CLOSE
from tests.fakes.agent import hello
from tests.fakes.tables import policy
from tests.unit.sessions import NOW, govern

SENTENCE, GOES_ON, END, START = FLAG_SENTENCE, FLAG_GOES_ON, FLAG_MARKER | FLAG_END, FLAG_MARKER
Token = tuple[int, int, float, int]


@dataclass
class Step:
    """An engine's step: tokens by slot, each with phase, flags, entropy and end-marker rank."""

    tokens: dict[int, list[Token]] = field(default_factory=dict)
    opened: dict[int, int] = field(default_factory=dict)
    preempted: list[int] = field(default_factory=list)
    resumed: list[int] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)
    # Result of the probe that was asked for last, by slot: EAT in nats, whether the answer would be empty, the number
    # of equal answers in a row, and the thinking tokens at the probe.
    samples: dict[int, tuple[float, bool, int, int]] = field(default_factory=dict)
    # Slots whose newest probe is refused.
    refused: list[int] = field(default_factory=list)
    # Cycles that are found, each with its slot, the tokens of a round and the tokens of the cycle.
    loops: list[tuple[int, int, int]] = field(default_factory=list)


class Engine:
    """A session that gets steps in reports of any length; no agent carries out its decisions."""

    def __init__(self, held: Policy) -> None:
        self.log, self.shadow, self.now = DecisionLog(), Comparison(), NOW
        self.session = Session(
            "s", hello(), NOW, Journal(self.log, "engine", "1", "s", NOW), self.shadow, parts=STREAM_PARTS
        )
        govern(self.session, 1, held)
        self.step, self.directives = 0, list[agent_pb2.Directives]()
        self.probes: dict[int, int] = {}

    def tell(self, steps: Sequence[Step]) -> None:
        """Send the session one report of these steps."""
        records = [self._record(step) for step in steps]
        report = step_report(records)
        said = self.session.on_message(agent_pb2.ConnectRequest(step=report), self.now)
        for response in said:
            self.directives.append(response.directives)
            self.probes |= {probe.slot: probe.decision_id for probe in response.directives.probes}

    def _record(self, step: Step) -> StepRecord:
        self.step += 1
        # Steps differ in their time, so that a wrong time of a token shows in the intervals.
        self.now += timedelta(milliseconds=7 * (1 + self.step % 4))
        ended_s = (self.now - NOW).total_seconds()
        record = replace(_events(step), step=self.step, ended_s=ended_s, step_time_ms=10.0, opened=[])
        for slot, phase in step.opened.items():
            info = RequestInfo(f"r{slot}", "m", "", "", 3, 1000, None)
            record.opened.append((slot, info, phase, 0, 0, 0, None, 0, False, False, False, False))
        entropies, ranks = list[float](), list[int]()
        for slot, tokens in step.tokens.items():
            for phase, flags, entropy, rank in tokens:
                record.add_row(slot, phase, flags, len(entropies))
                entropies.append(entropy)
                ranks.append(rank)
        columns, ranked = np.array(entropies, np.float32), np.array(ranks, np.int32)
        record.told = StepSignals(None, columns, ranked, -columns, -columns).encode()
        for slot, (eat_nats, empty, same, place) in step.samples.items():
            record.probes.append(MeasuredProbe(self.probes.get(slot, 0), slot, place, eat_nats, 1, same, empty, True))
        for slot in (*step.samples, *step.refused):
            if asked := self.probes.pop(slot, 0):
                record.outcomes.append((asked, agent_pb2.OUTCOME_APPLIED, 0, "", 0))
        return record

    def fired(self) -> list[tuple[Any, ...]]:
        """Return every decided end of thinking: its request, reason, shadow flag, signals, and the values that were
        compared."""
        made = list(self.log.decisions("force"))
        return sorted((d.life.opened.request_id, d.reason, d.shadow, repr(d.signals), repr(compared(d))) for d in made)

    def samples(self) -> dict[str, list[int]]:
        """Return the number of first values of each described signal in each bin."""
        return self.session.part(ControlGroup).experiments.newest()[0].samples

    def probed(self) -> list[tuple[Any, ...]]:
        made = list(self.log.decisions("probe"))
        return sorted((d.life.opened.request_id, d.reason, d.signals.think_tokens, repr(compared(d))) for d in made)

    def lives(self) -> list[tuple[Any, ...]]:
        """Return the other events of each request, in their order."""
        lives = [*self.log._over.values(), *self.log._live.values()]
        kinds = ("phase", "think_end", "preempted", "resumed", "closed")
        return sorted(
            (life.opened.request_id, e.kind, e.phase, e.think_tokens, e.output_tokens, e.detail)
            for life in lives
            for e in life.events
            if not hasattr(e, "policy") and e.kind in kinds
        )


def _events(step: Step) -> StepRecord:
    """Return a record of what decides with which other steps the agent merges a step."""
    record = StepRecord(preempted=step.preempted, resumed=step.resumed)
    record.opened = [(slot,) for slot in step.opened]
    record.closed = [(slot, agent_pb2.FINISH_REASON_STOP) for slot in step.closed]
    record.loops = step.loops
    return record


def cuts(steps: Sequence[Step], lengths: Iterable[int]) -> list[list[Step]]:
    """Cut the steps into reports of these lengths, as far as the agent would merge the steps."""
    reports, wanted = list[list[Step]](), iter(lengths)
    most = next(wanted, 1)
    for step in steps:
        if reports and len(reports[-1]) < most and mergeable([*map(_events, reports[-1])], _events(step)):
            reports[-1].append(step)
        else:
            most = next(wanted, 1) if reports else most
            reports.append([step])
    return reports


def told(held: Policy, reports: Iterable[Sequence[Step]]) -> Engine:
    made = Engine(held)
    for steps in reports:
        made.tell(steps)
    return made


# Every rule alone and all rules together, in force and in shadow; each rule fires at some places of the streams below.
OFF = {"rpdi_threshold": 0.0, "eat_probe_interval_tokens": 1 << 20}
LOOP = {"enabled": True, "min_tokens": 256, "min_rounds": 3}
RULES: dict[str, dict[str, Any]] = {
    "rank": {"entropy": OFF | {"rank_conditions": [{"max_ranks": [3]}]}},
    "rank over several ends": {"entropy": OFF | {"rank_conditions": [{"max_ranks": [4, 6]}, {"max_ranks": [9] * 4}]}},
    "rpdi": {"entropy": {"rpdi_threshold": 1.25, "rpdi_window_tokens": 2}},
    "rpdi, long window": {"entropy": {"rpdi_threshold": 1.1, "rpdi_window_tokens": 5}},
    "rank, confirmed": {
        "entropy": OFF | {"rank_conditions": [{"max_ranks": [4, 8]}, {"max_ranks": [2]}], "confirm_sentence_ends": 3}
    },
    "rpdi, confirmed": {"entropy": {"rpdi_threshold": 1.1, "rpdi_window_tokens": 2, "confirm_sentence_ends": 2}},
    "loop": {"entropy": {"enabled": False}, "loop": LOOP},
    "soft close": {"scheduler": {"soft_think_tokens": 4, "soft_close_rank": 4}, "entropy": {"enabled": False}},
    "all": {
        "scheduler": {"soft_think_tokens": 5, "soft_close_rank": 6},
        "entropy": {"rpdi_threshold": 1.5, "rpdi_window_tokens": 3, "rank_conditions": [{"max_ranks": [3, 8]}]},
        "loop": LOOP,
    },
}


# Descriptions of each signal at sentence ends, so that first values are counted while the rules are in force.
REFERENCES = {
    name: [{"max_value": edge, "requests": 9} for edge in (0.5, 1.0, 5.0)]
    for name in ("rank_reference", "rpdi_reference")
}


def with_rule(name: str, shadow: bool, floor: int, *, holdout_share: float = 0.02, **scheduler: Any) -> Policy:
    sections = RULES[name]
    return policy(
        scheduler={"min_think_tokens": floor, "max_think_tokens": 12, "shadow": shadow}
        | sections.get("scheduler", {})
        | scheduler,
        entropy={"shadow": shadow, "holdout_share": holdout_share, **sections["entropy"], **REFERENCES},
        loop={"shadow": shadow} | sections.get("loop", {}),
    )


def _token(draw: st.DrawFn, slot: int, phases: dict[int, int]) -> Token:
    """Draw one more token, which may change the phase."""
    before, kind = phases[slot], draw(st.integers(0, 19))
    signals = draw(st.sampled_from([0.0, 0.125, 1.0, 2.5])), draw(st.integers(0, 10))
    if before == THINK and kind == 0:
        phases[slot] = OUTPUT
        return (THINK, END, *signals)
    if before != THINK and kind < 8:
        phases[slot] = THINK
        return (THINK, START, *signals)
    phases[slot] = THINK if before == THINK else OUTPUT
    flags = SENTENCE * (kind % 2) + GOES_ON * (kind % 3 == 1)
    return (phases[slot], flags * (before == THINK), *signals)


@st.composite
def streams(draw: st.DrawFn, slots: int = 2, drafts: int = 1) -> list[Step]:
    """Draw an engine's steps: requests think, end thinking by themselves, think again, wait and close."""
    phases: dict[int, int] = {}
    waits: set[int] = set()
    steps = []
    for _ in range(draw(st.integers(1, 14))):
        step = Step()
        for slot in range(slots):
            if slot not in phases:
                phases[slot] = step.opened[slot] = draw(st.sampled_from([THINK, THINK, PROMPT]))
                waits.discard(slot)
            elif slot in waits:
                if draw(st.booleans()):
                    waits.remove(slot)
                    step.resumed.append(slot)
                else:
                    continue
            elif draw(st.integers(0, 9)) == 0:
                waits.add(slot)
                step.preempted.append(slot)
                continue
            rows = [_token(draw, slot, phases) for _ in range(draw(st.integers(0, drafts)))]
            if rows:
                step.tokens[slot] = rows
            if rows and phases[slot] == THINK and draw(st.integers(0, 5)) == 0:
                step.loops.append((slot, 100, draw(st.sampled_from([200, 300, 400]))))
            if slot not in step.opened and draw(st.integers(0, 19)) == 0:
                step.closed.append(slot)
                del phases[slot]
        steps.append(step)
    return steps


def same(held: Policy, steps: Sequence[Step], lengths: Sequence[int]) -> Engine:
    """Assert that single steps and reports of these lengths give the same ends, signals and counts; return the engine
    of the single steps."""
    single, merged = told(held, [[step] for step in steps]), told(held, cuts(steps, lengths))
    assert merged.fired() == single.fired()
    assert merged.lives() == single.lives()
    assert merged.samples() == single.samples()
    assert [(m.section, m.reason, m.requests, m.think_tokens) for m in merged.shadow.messages() if not m.reason] == [
        (m.section, m.reason, m.requests, m.think_tokens) for m in single.shadow.messages() if not m.reason
    ]
    for name in ("ends", "answers", "preempted", "below_cap"):
        assert getattr(merged.session.totals, name) == getattr(single.session.totals, name), name
    for name in ("output_itl", "ttot"):
        here, there = getattr(merged.session.totals, name), getattr(single.session.totals, name)
        assert here.counts.tolist() == there.counts.tolist(), name
    forces = Counter(d.counted_as for d in single.session.open_decisions.values() if d.kind == "force")
    assert Counter(d.counted_as for d in merged.session.open_decisions.values() if d.kind == "force") <= forces
    return single


LENGTHS = st.lists(st.integers(1, 9), max_size=14)


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=8)
@given(steps=streams(drafts=3), lengths=LENGTHS, shadow=st.booleans(), floor=st.sampled_from([0, 2, 5]))
def test_a_rule_sees_the_same_history_however_reports_are_cut(
    rule: str, steps: list[Step], lengths: list[int], shadow: bool, floor: int
) -> None:
    same(with_rule(rule, shadow, floor), steps, lengths)


@settings(max_examples=20)
@given(
    data=st.data(),
    shadow=st.booleans(),
    floor=st.sampled_from([0, 3, 6]),
    extension=st.sampled_from([0, 4]),
    gives_up=st.sampled_from([(0, True), (3, True), (3, False)]),
)
def test_rules_on_probes_fire_where_they_hold_and_the_floor_is_passed(
    data: st.DataObject, shadow: bool, floor: int, extension: int, gives_up: tuple[int, bool]
) -> None:
    """A sample's step may be anywhere in a report, with other steps before and after it."""
    held = policy(
        scheduler={"min_think_tokens": floor, "empty_answer_extension_tokens": extension},
        entropy=OFF
        | {"shadow": shadow, "eat_warmup_samples": 1, "ema_alpha": 1.0, "eat_probe_interval_tokens": 64}
        | {"eat_ema_variance_threshold": 1.0, "eat_level_threshold_nats": 1.0, "rank_conditions": [{"max_ranks": [2]}]}
        | {"give_up_tokens": gives_up[0], "give_up_shadow": gives_up[1]},
    )
    first = Step(opened={0: THINK, 1: THINK}, tokens={0: [(THINK, 0, 1.0, 5)], 1: [(THINK, 0, 1.0, 5)]})
    steps = [first, *(replace(step, opened={}, closed=[]) for step in data.draw(streams(drafts=2)))]
    steps = [replace(step, tokens={s: _goes_on(rows) for s, rows in step.tokens.items()}) for step in steps]
    for slot in (0, 1):
        at = data.draw(st.integers(1, len(steps) - 1))
        sample = data.draw(st.sampled_from([0.5, 2.0])), data.draw(st.booleans()), data.draw(st.integers(1, 4))
        steps[at].samples[slot] = *sample, data.draw(st.integers(1, 5))
    lengths = data.draw(LENGTHS)
    # The first step is a report of its own, because the probes are asked for in its answer.
    single, merged = told(held, [[step] for step in steps]), told(held, [[first], *cuts(steps[1:], lengths)])
    assert merged.fired() == single.fired()


@pytest.mark.parametrize("lengths", [[1] * 7, [1, 9], [5, 9], [6, 9]])
def test_the_first_rule_to_fire_would_have_ended_the_thinking_of_the_control_group(lengths: list[int]) -> None:
    """Soft close fires at the fifth token, and the rank rule, which precedes it at the same token, at the sixth."""
    tokens = [(THINK, 0, 1.0, 9)] * 3 + [(THINK, SENTENCE, 1.0, rank) for rank in (9, 5, 2, 2)]
    steps = [Step(opened={1: THINK} if not number else {}, tokens={1: [row]}) for number, row in enumerate(tokens)]
    made = told(with_rule("all", False, 0, holdout_share=0.5), cuts(steps, lengths))
    assert [fired[1:3] for fired in made.fired()] == [("rank", True), ("soft_close", True)]
    request = made.session.part(ControlGroup).requests.by_slot[1]
    assert (request.stopped_by, request.from_tokens) == (SOFT_CLOSE, 5)


def _goes_on(rows: list[Token]) -> list[Token]:
    return [(THINK, flags & ~END, entropy, rank) for _, flags, entropy, rank in rows]


@settings(max_examples=20)
@given(
    steps=streams(),
    lengths=LENGTHS,
    gate=st.sampled_from([0, 4, 8]),
    floor=st.sampled_from([0, 5]),
)
def test_probes_come_due_at_the_same_tokens(steps: list[Step], lengths: list[int], gate: int, floor: int) -> None:
    """All requests of this test go on thinking, because no probe is asked for if a request is known to have ended or
    waits."""
    steps = [replace(step, closed=[], preempted=[], resumed=[]) for step in steps]
    steps = [
        replace(
            step,
            opened=dict.fromkeys(step.opened, THINK) if not number else {},
            tokens={s: _goes_on(rows) for s, rows in step.tokens.items()},
        )
        for number, step in enumerate(steps)
    ]
    entropy = OFF | {"eat_warmup_samples": 1, "eat_probe_interval_tokens": 3, "eat_probe_max_rank": gate}
    held = policy(scheduler={"min_think_tokens": floor}, entropy=entropy)
    single, merged = told(held, [[step] for step in steps]), told(held, cuts(steps, lengths))
    assert merged.probed() == single.probed()
