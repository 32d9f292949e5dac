"""Compare families of stopping rules on the same recordings of all three tasks: `python -m tests.bench.rules_compared`.

Each family's rule is chosen on one half of the requests, with the same allowed loss and as calibration chooses, and
measured on the other half. Beside the product's rules there are CoDE-Stop, without and with its exit for unstable
answers; RCPD (arXiv 2508.17627), which is the product's rank rule read at every mark that may end a sentence, with the
published bounds among those tried; and ThinkBrake (arXiv 2510.00546) at the same marks, with up to four in a row.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from meridian_control.engine.token_rows import FLAG_GOES_ON
from meridian_control.offline import trace_file
from meridian_control.offline.calibration import RESAMPLES, Goal, Halves
from meridian_control.offline.candidates import GROUPS, single_rules
from meridian_control.offline.halves import halved
from meridian_control.offline.rule_replay import (
    CAP,
    EAT_GATED,
    EAT_PARAGRAPH,
    EAT_SENTENCE,
    EAT_SETTLED,
    RANK,
    RPDI,
    SIGNALS,
    SOFT,
    StoppingRule,
    Stops,
)
from meridian_control.offline.statistics import percentiles, resampled
from meridian_control.offline.trace_file import TraceWriter
from tests.bench import code_stop, harness, think_brake
from tests.bench.calibrate import LABELS, PARAGRAPHS, SENTENCES, TRACE
from tests.bench.code_stop import Recorded
from tests.bench.cuts import Reference
from tests.bench.driver import Engine
from tests.bench.harness import Column
from tests.bench.tasks import CALIBRATION_SEED, CHAIN, MAZE, RUNNING
from tests.bench.think_brake import AtMarks, laxer

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from meridian_control.offline.calibration import Figures, Tried
    from tests.bench.harness import Session
    from tests.bench.tasks import Task

EAT, SURE, CODE_STOP, MARKS = "EAT", "confidence", "CoDE-Stop", "mark"
LEVEL, FINER = "eat_level_threshold_nats", "EAT at paragraphs, finer"
RANK_MARKS = "RCPD: rank at marks"
# Families in the order of the table, after EAT with all its variants.
ORDER = (
    *(EAT_SENTENCE, EAT_PARAGRAPH, FINER, EAT_SETTLED, EAT_GATED, SURE, CODE_STOP),
    *(RANK, RANK_MARKS, think_brake.FAMILY, SOFT, RPDI, CAP),
)
SHOWN = {EAT_SENTENCE: "EAT at sentences"}
LOSSES = (0.01, 0.02)
TEXT = (
    "The tasks' models are `tests/data/*-qwen3`, recorded at temperature 1 in steps of {step_ms:g} ms; requests whose "
    "thinking ended: {about}. A case is a task and the allowed loss of answers. One half of the requests chose each "
    "rule, and the figures are of the other half, with 95 % bootstrap intervals. Tokens of probes count as thinking. "
    "*At most* is the upper bound of the answers lost, with 95 % confidence. *None*: no rule was within the loss. "
    "*Finer* tries twice as many levels, about as many as *confidence* tries. *Mean* is that of the difference from "
    "EAT on {splits} splits; *more, less* is the number of these on which its whole interval is above 0, and below 0."
)
COLUMNS = (
    Column("rule", "rule"),
    Column("saved", "thinking saved, %", 1, "difference", 100),
    Column("lost", "answers lost, %", 2, factor=100),
    Column("at_most", "at most, %", 2, factor=100),
    Column("probes", "probes per 1,000 tokens", 1),
    Column("than_eat", "saved more than EAT, points", 1, "difference", 100),
    Column("mean", "mean", 1, factor=100),
    Column("splits", "more, less"),
    Column("than_cap", "than a fixed cap, points", 1, "difference", 100),
)


def families(replay: Recorded, fit: NDArray[np.intp]) -> dict[str, Sequence[StoppingRule]]:
    """Return the rules that this recording can judge, with thresholds from the values of the requests `fit`.

    A probe of a sentence end is still under way at the end of a paragraph, so rules on probes at paragraphs have a
    recording of their own.
    """
    rules = single_rules(replay, fit)
    if isinstance(replay, AtMarks):
        return {RANK_MARKS: rules.get(RANK, []), think_brake.FAMILY: think_brake.candidates(replay, fit)}
    sure, unstable = code_stop.candidates(replay, fit)
    confident = {SURE: sure, CODE_STOP: [*sure, *unstable]}
    if replay.where == PARAGRAPHS:
        levels = rules.get(EAT_PARAGRAPH, [])
        return {EAT_PARAGRAPH: levels, FINER: _finer(levels), **confident}
    others = {family: rules.get(family, []) for family in ORDER if family in SIGNALS and family != EAT_PARAGRAPH}
    return {**others, **confident}


def _finer(rules: Sequence[StoppingRule]) -> list[StoppingRule]:
    """Return EAT rules and as many with levels in between, so that they are about as many as those on confidence."""
    finer = list(rules)
    for low, high in pairwise(rule.entropy for rule in rules):
        if low["confirm_sentence_ends"] == high["confirm_sentence_ends"]:
            finer.append(StoppingRule(EAT_PARAGRAPH, {**low, LEVEL: (low[LEVEL] * high[LEVEL]) ** 0.5}))
    return finer


@dataclass(frozen=True)
class Effect:
    """What a family's rule does on the half that did not choose it. spent, natural: thinking tokens by request, those
    of probes included in the first."""

    rule: str
    figures: Figures
    probes: float
    spent: dict[str, float]
    natural: dict[str, float]

    @property
    def values(self) -> dict[str, Any]:
        of = self.figures
        saved = [of.saved, of.saved_interval.low, of.saved_interval.high]
        alone = {"lost": of.harm, "at_most": of.harm_bound, "probes": self.probes}
        return {"rule": self.rule, "saved": saved} | {name: [value] * 3 for name, value in alone.items()}

    def less(self, other: Effect) -> list[float]:
        """Return the share of thinking that this rule saves more than the other, and its interval, over the requests
        that both recordings have."""
        both = [name for name in self.spent if name in other.spent]
        more = np.array([other.spent[name] - self.spent[name] for name in both])
        natural = np.array([self.natural[name] for name in both])
        weights = resampled(len(both), RESAMPLES)
        found = percentiles(weights @ more / (weights @ natural), 0.95)
        return [float(more.sum() / natural.sum()), found.low, found.high]


def effects(recordings: Sequence[Recorded], split: int) -> dict[float, dict[str, Effect]]:
    """Return each family's effect by allowed loss; of a family in several recordings, and of all variants of EAT
    together, that of the rule that saves most where it was chosen."""
    found: dict[float, dict[str, list[tuple[Halves, Tried | None]]]] = {loss: defaultdict(list) for loss in LOSSES}
    for replay in recordings:
        fit, held_out, unit = halved(replay.episodes.ids, replay.judge, split)
        halves = {loss: Halves(replay, fit, held_out, unit, Goal(loss)) for loss in LOSSES}
        for family, rules in families(replay, fit).items():
            tried = halves[LOSSES[0]].tried(rules)
            for loss, of in halves.items():
                chosen = of, of.best(tried, laxer)
                found[loss][SHOWN.get(family, family)].append(chosen)
                if GROUPS.get(family) == EAT:
                    found[loss][EAT].append(chosen)
    order = (EAT, *(SHOWN.get(family, family) for family in ORDER))
    return {loss: {name: _effect(*max(of[name], key=_saved)) for name in order} for loss, of in found.items()}


def _saved(chosen: tuple[Halves, Tried | None]) -> float:
    return chosen[1].saved if chosen[1] else 0.0


def _effect(halves: Halves, best: Tried | None) -> Effect:
    replay, where = halves.replay, halves.held_out
    count = len(replay.episodes.ids)
    never = np.full(count, np.inf)
    stops = best.stops if best else Stops(never, replay.judge.natural, never, np.zeros(count, np.int64))
    names, natural = [replay.episodes.ids[number] for number in where], replay.episodes.natural_tokens[where]
    probes = 1000 * stops.probes[where].sum() / np.minimum(stops.at_tokens[where], natural).sum()
    spent = dict(zip(names, halves.spent(stops, where).tolist(), strict=True))
    lengths = dict(zip(names, natural.tolist(), strict=True))
    return Effect(str(best.rule) if best else "none", halves.figures(stops, where), float(probes), spent, lengths)


def recordings(task: Task, session: Session) -> list[Recorded]:
    """Return both recordings of a task, with probes at sentence ends and at paragraph ends, and the first one read at
    marks; make them if needed."""
    given, wheres = session.options, (SENTENCES, PARAGRAPHS)
    folder = given.recordings / task.name
    if not all((folder / where / code_stop.CONFIDENCE).exists() for where in wheres):
        session.say(f"{task.name}: recording {given.requests} requests twice")
        samples, reference = task.samples(CALIBRATION_SEED, given.requests), Reference(task)
        with closing(Engine(task, folder, given.step_ms)) as engine:
            for where in wheres:
                code_stop.recorded(engine, reference, samples, folder / where)
    _read_at_marks(folder / SENTENCES, folder / MARKS)
    return [*(Recorded(folder / where) for where in wheres), AtMarks(folder / MARKS)]


def _read_at_marks(recording: Path, made: Path) -> None:
    """Write a recording again without the flag that a sentence goes on after a mark such as a full stop.

    A mark before white space or before a paragraph's end is then a sentence end itself. In the recording only the white
    space is one, where a model whose thinking ends after the mark never gives the end marker a chance.
    """
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    for name in (LABELS, code_stop.CONFIDENCE):
        shutil.copy(recording / name, made)
    with TraceWriter(made / TRACE) as trace:
        for record in trace_file.read(recording / TRACE):
            columns = record.up.step.tokens if record.up.HasField("step") else None
            if columns is not None and len(columns.flags):
                columns.flags[:] = [flags & ~FLAG_GOES_ON for flags in columns.flags]
            trace.write(record)


def measure(session: Session) -> dict[str, Any]:
    given, rows, about = session.options, list[list[Any]](), list[str]()
    wins: dict[str, list[str]] = defaultdict(list)
    for task in (MAZE, CHAIN, RUNNING):
        replays = recordings(task, session)
        about.append(f"{task.name} {len(replays[0].episodes.ids)}")
        splits = []
        for split in range(given.splits):
            splits.append(effects(replays, split))
            session.say(f"{task.name}: split {split + 1} of {given.splits}")
        for loss, name in product(LOSSES, splits[0][LOSSES[0]]):
            case, effect = f"{task.name}, {100 * loss:g} %", splits[0][loss][name]
            more = [of[loss][name].less(of[loss][EAT]) for of in splits]
            ahead, behind = sum(low > 0 for _, low, _ in more), sum(high < 0 for *_, high in more)
            values = effect.values | {"than_cap": effect.less(splits[0][loss][CAP]), "than_eat": more[0]}
            values["mean"] = [fmean(value for value, *_ in more)] * 3
            rows.append([case, name, "", values | {"splits": f"{ahead}, {behind}"}])
            if more[0][1] > 0 and 2 * ahead > len(splits) and effect.figures.harm <= loss:
                wins[name].append(case)
    text = TEXT.format(about=", ".join(about), step_ms=given.step_ms, splits=given.splits)
    session.table("Each family's rule", text, COLUMNS, "", rows=rows)
    return {"saves more than EAT": wins}


def options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--recordings", type=Path, help="folder of the recordings, which are made if it lacks them")
    add("--requests", type=int, default=1000, help="requests of each recording")
    add("--step-ms", type=float, default=20.0, help="least duration of a step in ms while recording")
    add("--splits", type=int, default=10, help="number of splits of a recording into parts at random")


def check(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    given.recordings = given.recordings or given.output / "recordings"
    if given.splits < 1:
        parser.error(f"--splits must be at least 1; got {given.splits}")


if __name__ == "__main__":
    harness.main("rules_compared", "Families of stopping rules", __doc__, options, measure, check=check)
