"""Let self-calibration look for rules on recordings of all three tasks: `python -m tests.bench.self_calibrated`.

The recordings are made with real engines and real probes. Self-calibration sees what it would store, three quarters of
the requests without their texts, and judges by trial answers. The rule that it finds is then measured on the other
quarter by what the model really answers if its thinking ends there.
"""

from __future__ import annotations

import argparse
import random
from contextlib import closing
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from meridian_control.capabilities.control_group.requests import shows_end
from meridian_control.capabilities.self_calibration.episodes import Episode, Sample
from meridian_control.offline.rule_replay import Replay
from meridian_control.offline.self_calibration import DELAY_TOKENS, episodes_of, stopping_rule, work
from tests.bench import harness
from tests.bench.calibrate import LABELS, PARAGRAPHS, SENTENCES, TRACE, record
from tests.bench.cuts import Reference
from tests.bench.driver import Engine
from tests.bench.harness import Column, Session
from tests.bench.replay import read
from tests.bench.tasks import CALIBRATION_SEED, CHAIN, MAZE, RUNNING, Task

LOSSES = (0.01, 0.02, 0.05)
SEEN = 0.75
TEXT = (
    "The tests' models at temperature 1 in steps of {step_ms:g} ms, some 1,000 requests each. A case is a task and "
    "where it is probed; an arm is `max_loss`. In each of {splits} splits three quarters of the requests are what "
    "self-calibration has stored, and the others show what its rule really does; figures are medians of the splits "
    "that found one. *Proved* is judged by trial answers, whose first token must stay, and *really lost* by the whole "
    "answers that the model gives. Tokens of probes count as thinking."
)
COLUMNS = (
    Column("found", "rule found, of the splits"),
    Column("rule", "rule of the first such split"),
    Column("proved", "proved: lost at most, %", 2, factor=100),
    Column("saved", "thinking saved, %", 1, factor=100),
    Column("lost", "really lost, %", 2, factor=100),
    Column("worst", "really lost in the worst split, %", 2, factor=100),
)


def recordings(task: Task, session: Session) -> dict[str, Replay]:
    """Return both recordings of a task, by the place of their probes; make them if they are missing."""
    given, folder = session.options, session.options.recordings / task.name
    if not all((folder / where / LABELS).exists() for where in (SENTENCES, PARAGRAPHS)):
        session.say(f"{task.name}: recording {given.requests} requests twice")
        samples, reference = task.samples(CALIBRATION_SEED, given.requests), Reference(task)
        with closing(Engine(task, folder, given.step_ms)) as engine:
            for where in (SENTENCES, PARAGRAPHS):
                record(engine, reference, samples, folder / where, where)
    return {where: read(folder / where / TRACE, folder / where / LABELS) for where in (SENTENCES, PARAGRAPHS)}


def rows_of(replay: Replay) -> list[Episode]:
    """Return all requests of a recording as self-calibration stores them."""
    of = replay.episodes
    samples: list[list[Sample]] = [[] for _ in of.ids]
    columns = (of.sample_owner, of.sample_tokens, of.sample_arrived, of.eat_nats, of.cost_tokens)
    for owner, place, arrived, eat, cost, same, empty in zip(*columns, of.same_answer, of.empty_answer, strict=True):
        measured = int(place), int(arrived), float(eat), int(cost), int(same), bool(empty)
        # The answers of these tasks differ from question to question.
        samples[owner].append(Sample(*measured, is_read=True, is_other=True))
    return [
        Episode(name, int(natural), tuple(mine))
        for name, natural, mine in zip(of.ids, of.natural_tokens, samples, strict=True)
    ]


def split_of(replay: Replay, rows: list[Episode], max_loss: float, split: int) -> dict[str, Any]:
    """Return what self-calibration finds on one part of a recording, and what that really does on the rest. rows: all
    requests of the recording."""
    order = random.Random(split).sample(range(len(rows)), len(rows))
    seen, others = order[: int(SEEN * len(rows))], np.array(sorted(order[int(SEEN * len(rows)) :]))
    told = [
        row.to_json()
        for row in map(rows.__getitem__, seen)
        if row.samples and shows_end(row.samples[-1].think_tokens, row.natural_tokens)
    ]
    base = replay.base
    if not told:
        return {"why": "no request has a probe near the end of its thinking"}
    found = work({"base": base.model_dump_json(), "episodes": told, "max_loss": max_loss, "attempt": 1})
    if (rule := found.get("rule")) is None:
        return {"why": found.get("why") or f"a proof needs {found['missing']} more requests"}
    real = Replay(episodes_of(rows, rule["floor_tokens"]), replay.judge, base, DELAY_TOKENS)
    stops, natural = real.stops(stopping_rule(rule["entropy"])), replay.episodes.natural_tokens
    spent = np.minimum(stops.at_tokens, natural) + stops.probes * real.cost_tokens
    lost = np.where(np.isfinite(stops.at_tokens), np.maximum(0, replay.judge.natural - stops.right), 0.0)
    return {
        "rule": rule["text"],
        "proved": rule["bound"],
        "saved": 1 - spent[others].sum() / natural[others].sum(),
        "lost": float(np.nanmean(lost[others])),
    }


def measure(session: Session) -> dict[str, Any]:
    given, rows = session.options, list[list[Any]]()
    result: dict[str, Any] = {}
    for task in (MAZE, CHAIN, RUNNING):
        at = {where: (replay, rows_of(replay)) for where, replay in recordings(task, session).items()}
        for where, loss in product(at, LOSSES):
            tried = [split_of(*at[where], loss, split) for split in range(given.splits)]
            found = [each for each in tried if "rule" in each]
            case, text = f"{task.name}, {where} ends", f"{len(found)} of {given.splits}"
            values: dict[str, Any] = {"found": text, "rule": found[0]["rule"] if found else tried[0]["why"]}
            if found:
                values |= {name: [median(each[name] for each in found)] * 3 for name in ("proved", "saved", "lost")}
                values["worst"] = [max(each["lost"] for each in found)] * 3
            rows.append([case, f"{100 * loss:g} %", "", values])
            result.setdefault(case, {})[f"{100 * loss:g} %"] = text
            session.say(f"{case}, {100 * loss:g} %: {text}")
    about = TEXT.format(splits=given.splits, step_ms=given.step_ms)
    session.table("What is found", about, COLUMNS, "", rows=rows)
    return result


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
    harness.main("self_calibrated", "What self-calibration finds", __doc__, options, measure, check=check)
