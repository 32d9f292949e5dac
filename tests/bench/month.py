"""Simulate months of traffic under self-calibration, in virtual time: `python -m tests.bench.month`.

The control plane's own parts decide: self-calibration, rollouts and policies over a real SQLite store, and the real
calibration. Requests and engines are made up. Each seed is a month of three classes: `chat`, whose answers settle and
whose model changes on day 10; `code`, which becomes harder on day 14, so that EAT falls before some answers have
settled; and `batch`, which misleads from the beginning, and from day 20 on comes from a tenant with other habits. No
request comes from day 15 to day 21.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from multiprocessing import Pool
from pathlib import Path
from typing import Any

import numpy as np
from meridian.v1 import fleet_pb2

from meridian_control.capabilities.self_calibration import rule as rules
from meridian_control.capabilities.self_calibration.episodes import Episode
from meridian_control.capabilities.self_calibration.fleet import SelfCalibration
from meridian_control.capabilities.self_calibration.learner import Rule, State
from meridian_control.common.inference import binomial_lower
from meridian_control.offline.correctness import from_probes
from meridian_control.offline.rule_replay import CAP, Replay, StoppingRule
from meridian_control.offline.self_calibration import DELAY_TOKENS, episodes_of, stopping_rule, work
from meridian_control.policy.formats import parse_toml
from meridian_control.policy.model import Who
from meridian_control.policy.store import PolicyStore
from meridian_control.rollout.state import Rollout
from meridian_control.storage.database import Database
from tests.bench import harness
from tests.bench.harness import Column, Interval, Session
from tests.fakes.control import control_plane
from tests.fakes.episodes import Traffic

DAYS, MAX_LOSS = 30, 0.02
# Requests per day and class that are measured in shadow (5 % by default), those of them that are in the control group
# (2 %) and so are recorded while a rule is in force, too, and requests by which a rule's true loss is found.
PER_DAY, CONTROL_A_DAY, FRESH = 125, 50, 3000
QUIET = range(15, 22)
ASKED = parse_toml(f"[entropy]\nself_calibration = true\nmax_loss = {MAX_LOSS}\n[scheduler]\nmin_think_tokens = 256")
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
EASY, MISLED = Traffic(), Traffic(misled=0.15)
HARDER = Traffic(settles=(0.4, 0.95), misled=0.15)
CLASSES = ("chat", "code", "batch")
LEVELS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
COLUMNS = (
    Column("saved", "thinking saved, %", 1, factor=100),
    Column("lost", "answers lost, %", 2, factor=100),
    Column("rules", "rules in force", 1),
    Column("withdrawn", "withdrawn", 1),
    Column("days", "days in force", 1),
)


def traffic_of(slo_class: str, day: int) -> tuple[Who, Traffic]:
    """Return what a class sends on a day, by what name."""
    if slo_class == "chat":
        return Who("m", slo_class="chat", fingerprint="a" * 16 if day < 10 else "b" * 16), EASY
    if slo_class == "code":
        return Who("m", slo_class="code", fingerprint="c" * 16), EASY if day < 14 else HARDER
    return Who("m", slo_class="batch", fingerprint="c" * 16), MISLED if day < 20 else replace(
        MISLED, undecided_nats=2.0
    )


def outcome(rule: StoppingRule, replay: Replay) -> tuple[float, float, int, int]:
    """Return the thinking tokens that a rule leaves, those without it, lost answers, and requests."""
    stops, natural = replay.stops(rule), replay.episodes.natural_tokens
    spent = np.minimum(stops.at_tokens, natural).sum() + stops.probes.sum() * replay.cost_tokens
    lost = int((np.isfinite(stops.at_tokens) & (stops.right < 1)).sum())
    return float(spent), float(natural.sum()), lost, len(natural)


def replay_of(rows: Sequence[Episode], floor: int) -> Replay:
    episodes = episodes_of(rows, floor)
    return Replay(episodes, from_probes(episodes), ASKED, DELAY_TOKENS)


@dataclass
class Counted:
    """What a class has gained and lost. proofs: of each rule that came into force, its true loss at that time."""

    spent: float = 0.0
    natural: float = 0.0
    lost: int = 0
    requests: int = 0
    rules: int = 0
    withdrawn: int = 0
    days: int = 0
    proofs: list[tuple[int, int]] = field(default_factory=list)
    rows: list[Episode] = field(default_factory=list)


class Month:
    """One month of one seed."""

    def __init__(self, seed: int) -> None:
        self.rng, self.now = random.Random(seed), BEGIN
        self.counted = {name: Counted() for name in CLASSES}
        # By traffic, how many rules were proved and withdrawn.
        self.by_traffic: dict[str, tuple[int, int]] = {}

    async def run(self, path: Path) -> dict[str, Counted]:
        store = PolicyStore(await Database.open(f"sqlite+aiosqlite:///{path}"))
        try:
            await store.append(ASKED, etag="", author="ops", reason="", now=self.now)
            self.parts = control_plane(store, lambda: self.now)
            self.parts.rollouts.engines = self.engines
            await self.parts.look()
            self.part = self.parts.whole.fleet.part(SelfCalibration)
            self.part.calibrate = self.calibrate
            # No rollout is stopped here, so that its steps may be short.
            rules.BAKE_S = 5.0
            for day in range(DAYS):
                await self.day(day)
        finally:
            await store.database.close()
        return self.counted

    async def calibrate(self, task: dict[str, Any]) -> dict[str, Any]:
        return work(task)

    async def engines(self) -> list[fleet_pb2.Engine]:
        """Return one engine that has put each candidate in force at once, and whose control group it has not harmed."""
        rollout = self.parts.rollouts.newest
        revision = rollout.candidate_revision if rollout is not None else 1
        engine = fleet_pb2.Engine(engine_id="e", revision=revision, acked_revision=revision)
        engine.state = fleet_pb2.CONNECTION_STATE_CONNECTED
        engine.control_group["judged"] = int((self.now - BEGIN).total_seconds())
        return [engine]

    async def day(self, day: int) -> None:
        self.now = BEGIN + timedelta(days=day)
        for name in CLASSES if day not in QUIET else ():
            who, traffic = traffic_of(name, day)
            rows = traffic.episodes(self.rng, PER_DAY, f"{name}{day}-")
            rule = await self.rule_of(who)
            self.count(name, rule, rows)
            for row in rows if rule is None else rows[:CONTROL_A_DAY]:
                self.part.record(who.traffic, row)
        await self.part.tick()
        await self.roll_out()

    def count(self, name: str, rule: Rule | None, rows: list[Episode]) -> None:
        """Count what the rule in force, if there is one, does to requests like these."""
        counted = self.counted[name]
        replay = replay_of(rows, rule.floor_tokens if rule is not None else 0)
        nothing = StoppingRule(CAP, {}, {"max_think_tokens": 1 << 30})
        spent, natural, lost, requests = outcome(stopping_rule(rule.entropy) if rule is not None else nothing, replay)
        counted.spent += spent
        counted.natural += natural
        counted.lost += lost
        counted.requests += requests
        counted.days += rule is not None
        counted.rows += rows

    async def rule_of(self, who: Who) -> Rule | None:
        assert self.part._store is not None
        learner = (await self.part._store.learners()).get(who.traffic)
        return learner.rule if learner is not None and learner.state is State.IN_FORCE else None

    async def roll_out(self) -> None:
        """Let rollouts run to their ends, and note the true loss of each rule that comes into force."""
        while (rollout := await self.parts.rollouts.store.active()) is not None:
            await self.until_ended(rollout)
            await self.part.tick()
        assert self.part._store is not None
        for learner in (await self.part._store.learners()).values():
            who = Who.of_traffic(learner.traffic)
            counted = self.counted[who.slo_class]
            withdrawn = sum(tried.outcome.startswith("withdrawn") for tried in learner.tried)
            proved = sum(": saves" in tried.outcome for tried in learner.tried)
            day = (self.now - BEGIN).days
            if learner.rule is not None and learner.since.date() == self.now.date():
                fresh = traffic_of(who.slo_class, day)[1].episodes(self.rng, FRESH, "fresh")
                _, _, lost, requests = outcome(
                    stopping_rule(learner.rule.entropy), replay_of(fresh, learner.rule.floor_tokens)
                )
                counted.proofs.append((lost, requests))
            self.by_traffic[learner.traffic] = proved, withdrawn
        for name in CLASSES:
            mine = [each for traffic, each in self.by_traffic.items() if Who.of_traffic(traffic).slo_class == name]
            self.counted[name].rules = sum(proved for proved, _ in mine)
            self.counted[name].withdrawn = sum(withdrawn for _, withdrawn in mine)

    async def until_ended(self, rollout: Rollout) -> None:
        for _ in range(1000):
            self.now += timedelta(seconds=5)
            await self.parts.rollouts.tick()
            if not (await self.parts.rollouts.store.get(rollout.rollout_id)).active:
                return
        raise AssertionError(f"rollout {rollout.rollout_id} does not end")


def in_hindsight(rows: Sequence[Episode]) -> dict[str, list[tuple[float, float]]]:
    """Return what fixed rules and fixed caps would have done over the month: the saved share of the thinking, and the
    share of lost answers, of each."""
    replay = replay_of(rows, 256)
    tokens = np.quantile(replay.episodes.natural_tokens, np.linspace(0, 1, 41)).astype(int)
    families = {
        "fixed rule": [
            stopping_rule({"eat_level_threshold_nats": level, "confirm_sentence_ends": times})
            for level in LEVELS
            for times in (1, 2)
        ],
        "fixed cap": [StoppingRule(CAP, {}, {"max_think_tokens": int(cap)}) for cap in tokens],
    }
    found: dict[str, list[tuple[float, float]]] = {}
    for name, tried in families.items():
        for each in tried:
            spent, natural, lost, requests = outcome(each, replay)
            found.setdefault(name, []).append((1 - spent / natural, lost / requests))
    return found


def best(tried: list[tuple[float, float]], most_lost: float) -> float:
    """Return the largest saving of those that lose no more than this share; 0 for none."""
    return max((saved for saved, lost in tried if lost <= most_lost), default=0.0)


def simulated(seed: int) -> dict[str, Any]:
    """Simulate one month, and return its figures by class and arm."""
    with tempfile.TemporaryDirectory(prefix="month-") as folder:
        counted = asyncio.run(Month(seed).run(Path(folder) / "m.db"))
    found: dict[str, Any] = {}
    for name, each in counted.items():
        mine = {
            "saved": 1 - each.spent / each.natural,
            "lost": each.lost / each.requests,
            "rules": float(each.rules),
            "withdrawn": float(each.withdrawn),
            "days": float(each.days),
        }
        hindsight = in_hindsight(each.rows)
        found[name] = {
            "arms": {
                "self-calibration": mine,
                "best fixed rule in hindsight": {"saved": best(hindsight["fixed rule"], MAX_LOSS)},
                "fixed cap of equal loss, in hindsight": {"saved": best(hindsight["fixed cap"], mine["lost"])},
            },
            "proofs": each.proofs,
        }
    return found


async def measure(session: Session) -> dict[str, Any]:
    given, runs = session.options, session.runs
    wrong, proofs = 0, 0
    with Pool(given.processes) as pool:
        for seed, found in enumerate(pool.imap(simulated, range(given.seeds))):
            exceeded = False
            for name, each in found.items():
                for arm, figures in each["arms"].items():
                    session.add(arm, figures, seed, name)
                proofs += len(each["proofs"])
                # A loss that is measured on so many requests exceeds the allowed one if its lower bound does.
                exceeded |= any(binomial_lower(lost, of, 0.99) > MAX_LOSS for lost, of in each["proofs"])
            wrong += exceeded
            session.say(f"seed {seed}: {proofs} rules so far, {wrong} months with a rule that loses too much")
    text = (
        f"{given.seeds} months of {DAYS} days; of each class {PER_DAY} requests a day are recorded, {CONTROL_A_DAY} "
        f"while a rule is in force; max_loss {MAX_LOSS:g}. {proofs} rules came into force; in {wrong} months one of "
        f"them really lost more than that, where 5 % are allowed."
    )
    session.table("Months", text, COLUMNS, "")
    share = wrong / given.seeds
    session.goal("months with a rule that loses more than `max_loss`", "<= 0.05", Interval(share, share, share))
    saved = {name: {arm: runs.median(arm, "saved", name).rounded() for arm in runs.arms(name)} for name in runs.cases()}
    return {"months": given.seeds, "rules": proofs, "months_with_too_much_loss": wrong, "saved": saved}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=200, help="number of months")
    parser.add_argument("--processes", type=int, default=1, help="months that are simulated at once")


if __name__ == "__main__":
    harness.main("month", "Months of self-calibration", __doc__, options, measure)
