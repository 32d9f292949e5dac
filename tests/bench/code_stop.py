"""CoDE-Stop (arXiv 2604.04930), which ends thinking by the confidence of trial answers, tried on a recording.

The rule and its published values are those of the paper's second version, as a reproduction of it (Logericz/CoDE)
states them. The authors' code differs from the paper's formulas.

A probe measures no confidence, so it is computed with Transformers from the recorded tokens, as labels are. Answers of
the tasks differ in one token, so the confidence of an answer is the probability of its likeliest such token.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from meridian_control.journal.request_ids import shortened
from meridian_control.offline.candidates import COARSE, CONFIRMATIONS, GRID, HIGH, LAXER, loosened, quantiles
from meridian_control.offline.episodes import newest_values
from meridian_control.offline.rule_replay import EAT_PARAGRAPH, EAT_SENTENCE, Replay, StoppingRule
from tests.bench.calibrate import LABELS, PARAGRAPHS, TRACE, record
from tests.bench.replay import read

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tests.bench.cuts import Reference
    from tests.bench.driver import Engine, Sample

CONFIDENCE = "confidence.jsonl"
# Published: the confidence that ends thinking rises over so many trial answers, from 0.9 to 0.95, so the first doubt is
# twice the last; and a trial answer is unstable if twice its confidence less the one before is below this bound.
RAMP_ANSWERS, FIRST_DOUBT, UNSTABLE_BELOW = 2, 2.0, 0.55


@dataclass(frozen=True)
class CourseRule(StoppingRule):
    """Ends thinking if trial answers are sure, or have been unstable too often. family: the EAT rule whose probes it
    reads.

    doubt: 1 - confidence up to which an answer is sure, as often in a row as `confirm` says. first_doubt: the same for
    the first answer; between them are RAMP_ANSWERS. instability: sum over unstable answers, of 1 + log(thinking tokens
    now / thinking tokens then), from which on thinking ends.
    """

    doubt: float = 0.0
    first_doubt: float = 0.0
    instability: float = np.inf
    confirm: int = 1

    def __str__(self) -> str:
        text = f"confidence >= {1 - self.doubt:.4g}"
        text += f", at first {1 - self.first_doubt:.4g}" if self.first_doubt != self.doubt else ""
        text += f", {self.confirm} times in a row" if self.confirm > 1 else ""
        text += f", or instability >= {self.instability:.3g}" if np.isfinite(self.instability) else ""
        return text + (" at a paragraph" if self.family == EAT_PARAGRAPH else "")


def laxer(rule: StoppingRule) -> StoppingRule:
    """Return the rule with every threshold loosened by as much as calibration loosens those of the product's rules."""
    if not isinstance(rule, CourseRule):
        return loosened(rule)
    doubt, first = LAXER * rule.doubt, LAXER * rule.first_doubt
    return replace(rule, doubt=doubt, first_doubt=first, instability=rule.instability / LAXER)


class Recorded(Replay):
    """A recording with the confidence of the trial answer at each boundary that has a sample, else NaN, [boundaries].

    where: the placement of the recording's probes, which the folder is named for.
    """

    def __init__(self, folder: Path) -> None:
        recorded, rows = read(folder / TRACE, folder / LABELS), (folder / CONFIDENCE).read_text().splitlines()
        by_name = {row["request_id"]: row["confidence"] for row in map(json.loads, rows)}
        # Both recordings of a task have the same names, so they have the same halves. Ids end in random characters.
        names = [next(name for name in shortened(i) if name in by_name) for i in recorded.episodes.ids]
        super().__init__(replace(recorded.episodes, ids=names), recorded.judge, recorded.base, delay_tokens=2)
        boundaries = zip(self.episodes.owner, self.episodes.sample, strict=True)
        self.confidence = np.array(
            [by_name[names[n]][self.episodes.sample_tokens[at]] if at >= 0 else np.nan for n, at in boundaries]
        )
        self.where = folder.name

    def _fires(self, rule: StoppingRule) -> tuple[NDArray[Any], ...]:
        if not isinstance(rule, CourseRule):
            return super()._fires(rule)
        at, owner, doubt, number = self.trial_answers(rule)
        allowed = rule.doubt + (rule.first_doubt - rule.doubt) * np.maximum(0, 1 - number / RAMP_ANSWERS)
        sure = newest_values(owner, (doubt <= allowed).astype(int), rule.confirm).all(axis=1)
        fires = sure | (self.instability(rule) >= rule.instability)
        return self._first(self.episodes.owner, at[fires]), *self._eat[False], self.episodes.decided_tokens

    def trial_answers(self, rule: StoppingRule) -> tuple[NDArray[Any], ...]:
        """Return the boundaries with a trial answer that the rule reads; and of each the request, the doubt, and the
        number of the request's earlier ones."""
        at = self._subset(*self._probing(rule))
        at = at[np.isfinite(self.confidence[at])]
        owner = self.episodes.owner[at]
        return at, owner, 1 - self.confidence[at], np.arange(len(at)) - np.searchsorted(owner, owner)

    def instability(self, rule: StoppingRule) -> NDArray[np.float64]:
        """Return the instability at each trial answer that the rule reads."""
        at, owner, doubt, number = self.trial_answers(rule)
        before = newest_values(owner, 1 - doubt, 2)[:, 1]
        unstable = (number > 0) & (2 * (1 - doubt) - before < UNSTABLE_BELOW)
        log = np.log(np.maximum(1, self.episodes.sample_tokens[self.episodes.sample[at]]))

        def so_far(values: NDArray[Any]) -> NDArray[np.float64]:
            """Return the sum of the values of the request's trial answers up to each."""
            running = np.concatenate([[0.0], np.cumsum(values)])
            sums: NDArray[np.float64] = running[1:] - running[np.searchsorted(owner, owner)]
            return sums

        score: NDArray[np.float64] = so_far(unstable) * (1 + log) - so_far(unstable * log)
        return score


def candidates(replay: Recorded, requests: NDArray[np.intp]) -> tuple[list[CourseRule], list[CourseRule]]:
    """Return the rules without and with the exit for unstable answers, with thresholds from these requests' values."""
    family = EAT_PARAGRAPH if replay.where == PARAGRAPHS else EAT_SENTENCE
    probes = {"eat_probe_placement": replay.where, "eat_probe_max_rank": 0}
    plain = CourseRule(family, {**probes, "eat_probe_interval_tokens": 1})
    _, owner, doubts, _ = replay.trial_answers(plain)
    here = np.isin(owner, requests)

    def sure(grid: tuple[float, ...]) -> list[CourseRule]:
        return [
            replace(plain, doubt=doubt, first_doubt=first * doubt, confirm=number)
            for doubt, first, number in product(quantiles(doubts[here], grid), (1, FIRST_DOUBT), CONFIRMATIONS)
        ]

    scores = quantiles(replay.instability(plain)[here], HIGH)
    return sure(GRID), [replace(rule, instability=score) for rule, score in product(sure(COARSE), scores)]


def recorded(engine: Engine, reference: Reference, samples: Sequence[Sample], folder: Path) -> None:
    """Record requests, with their labels and the confidence of the answer at each cut. folder: named for the placement
    of the probes. Raises BenchError."""
    batch = record(engine, reference, samples, folder, folder.name)
    with (folder / CONFIDENCE).open("w") as file:
        for sample, done in zip(samples, batch.completions, strict=True):
            confidence = [round(c, 6) for c in reference.cuts(sample, done).confidence]
            file.write(json.dumps({"request_id": sample.name, "confidence": confidence}) + "\n")
