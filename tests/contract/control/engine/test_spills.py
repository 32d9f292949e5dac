"""Forced ends that spill, through the real server: from an engine's reports to `meridianctl savings` and the metric of
the alert."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from meridian_agent.core.phases import FLAG_SENTENCE
from meridian_agent.core.step_signals import StepSignals
from meridian_control.capabilities.control_group.fleet import Comparisons
from meridian_control.capabilities.control_group.rule import held_out
from meridian_control.capabilities.control_group.stream import ControlGroup
from tests.contract.control.fleet.test_harm_guard import savings
from tests.contract.ctl import ctl
from tests.fakes.engine import END, START, TEXT
from tests.fakes.fleets import engines_of
from tests.fakes.linked import LinkedEngine
from tests.fakes.sentences import ends_by_id
from tests.fakes.tables import policy
from tests.unit.sessions import EARLY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.contract.streams import Control

# The rule fires at the first sentence end, and needs no probe.
RANK = {"shadow": False, "holdout_share": 0.5, "rank_conditions": [{"max_ranks": [1]}], "eat_level_threshold_nats": 0.0}
RULES = policy(scheduler=EARLY, entropy=RANK)
NAMES = [f"r{number}" for number in range(80)]
HELD = [name for name in NAMES if held_out(name, 0.5)]
TREATED = [name for name in NAMES if name not in HELD]


class MeasuredEngine(LinkedEngine):
    """A linked engine whose every token ends a sentence at which the end marker is the likeliest token.

    An answering request gets a token only if the test wants one, so that lengths do not depend on the server's speed.
    """

    def __init__(self, targets: Sequence[str]) -> None:
        super().__init__(targets)
        self.wanted: dict[str, int] = {}

    def step(self) -> None:
        """Run one engine step. The model wants the token that the test has set for a request, or else text."""
        self.take_inbox()
        engine = self.engine
        engine.tracker.sentences = ends_by_id(bytes(TEXT) + bytes([FLAG_SENTENCE]))
        engine.schedule()
        engine.mask()
        for name in [name for name in engine.live if name in self.wanted or engine.thinking(name)]:
            engine.feed(name, engine.sample(name, [self.wanted.get(name, TEXT)]))
        record = engine.tracker.record
        record.rows = list(range(len(record.slots)))
        zeros = np.zeros(len(record.slots), np.float32)
        record.told = StepSignals(None, zeros, zeros.astype(np.int32) + 1, zeros, zeros).encode()
        self.wanted = {}
        self.send(engine.take())


async def test_forced_ends_that_spill_are_seen_from_the_report_to_the_alert(control: Control) -> None:
    stored = await control.set_policy(RULES)
    engine = MeasuredEngine([control.target])
    with engine:
        await engine.steps_until(lambda: [e.acked_revision for e in engines_of(control.fleet)] == [stored.revision])
        for name in NAMES:
            engine.open(name)
        await engine.steps_until(lambda: not any(map(engine.engine.thinking, TREATED)))
        (connection,) = control.fleet.connections
        requests = connection.session.part(ControlGroup).requests.by_slot
        await engine.steps_until(lambda: sum(request.stopped for request in requests.values()) == len(HELD))
        assert all(map(engine.engine.thinking, HELD)), "the rule only shadows them"
        spilling = TREATED[::2]
        engine.wanted = dict.fromkeys(HELD, END) | dict.fromkeys(spilling, START)
        engine.step()
        for _ in range(4):
            engine.wanted = dict.fromkeys(NAMES, TEXT)
            engine.step()
        assert all(map(engine.engine.thinking, spilling))
        for name in NAMES:
            engine.engine.finish(name)
        await engine.steps_until(lambda: not control.names())
    (told,) = [row for row in (await savings(control)).savings if row.in_force]
    forced, natural = told.forced_ends, told.natural_ends
    assert (forced.ends, forced.reentries, forced.empty_answers) == (len(TREATED), len(spilling), 0)
    assert (natural.ends, natural.reentries, natural.empty_answers) == (len(HELD), 0, 0)
    assert (told.long_answer_tokens, forced.long_answers, natural.long_answers) == (4, 0, 0)
    assert told.spills.value == len(spilling) / len(TREATED)
    assert 0.05 < told.spills.low < told.spills.value < told.spills.high
    text = (await ctl(control, "savings")).stdout
    lines = [" ".join(line.split()) for line in text.splitlines()]
    share = f"{100 * len(spilling) / len(TREATED):.1f}"
    assert [line.split()[:5] for line in lines if line.startswith("forced, treated")] == [
        ["forced,", "treated", str(len(TREATED)), share, "%"]
    ]
    assert any(
        line.startswith(f"spilled after forced ends, against natural ends: {told.spills.value:+.1%}"[:-1])
        for line in lines
    )
    comparisons = control.fleet.part(Comparisons)
    await comparisons.tick()
    values = {name: dict(found) for name, found in comparisons.metrics(await control.fleet.totals())}
    assert values["meridian_spill_difference_ratio"]["low",] == told.spills.low
    assert values["meridian_compared_ends_total"]["entropy", "", "forced", "reentry"] == len(spilling)
    assert values["meridian_compared_ends_total"]["entropy", "", "natural", "ended"] == len(HELD)
