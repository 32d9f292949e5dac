"""Calibrates an EAT rule on the episodes of self-calibration, or judges one, in a process of its own: this takes
seconds of processor time, for which streams must not wait.

`run` reads a task from standard input: a line of JSON, and a line for each episode, also of JSON. It writes the result
as JSON to standard output.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from meridian_control.capabilities.self_calibration.episodes import Episode
from meridian_control.capabilities.self_calibration.learner import fewest
from meridian_control.common.look import percent
from meridian_control.common.table_columns import CONFIRM_HISTORY, RANK_HISTORY
from meridian_control.offline.calibration import Goal, calibrate
from meridian_control.offline.candidates import CONFIRMATIONS, eat_rule
from meridian_control.offline.correctness import AnswersAlikeError, check_answers_differ, from_probes
from meridian_control.offline.episodes import Episodes
from meridian_control.offline.halves import MIN_REQUESTS
from meridian_control.offline.rule_replay import EAT_SENTENCE, Replay, StoppingRule
from meridian_control.policy.effects import probe_lead_tokens
from meridian_control.policy.model import Policy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Fields of the policy that a rule sets. The rule reads the newest probe, so that it needs few probes before its floor.
# The places of probes stay the policy's own, at which the episodes' probes are.
CHOSEN = (
    "ema_alpha",
    "eat_warmup_samples",
    "eat_ema_variance_threshold",
    "eat_level_threshold_nats",
    "confirm_sentence_ends",
)
# Most bytes that a calibration takes beside those of the program itself.
MOST_BYTES = 600 << 20
# Reports between a decision and its effect for a request that no probe holds.
DELAY_TOKENS = 2


def episodes_of(rows: Sequence[Episode], from_tokens: int) -> Episodes:
    """Return requests as columns in which each probe that a rule reads is a sentence end without other signals.

    from_tokens: thinking tokens before which no rule reads a probe.
    """
    samples = [(owner, sample) for owner, row in enumerate(rows) for sample in row.samples]
    columns = [np.array(column) for column in zip(*(sample for _, sample in samples), strict=True)]
    places, arrived, eat, cost, same, empty, is_read, is_other = columns
    owner = np.array([owner for owner, _ in samples], np.int64)
    read = np.flatnonzero(is_read & (places >= from_tokens))
    count = len(read)
    zeros = np.zeros(count, np.int64)
    return Episodes(
        ids=[row.name for row in rows],
        natural_tokens=np.array([row.natural_tokens for row in rows], np.int64),
        owner=owner[read],
        think_tokens=places[read],
        decided_tokens=arrived[read],
        paragraph=np.zeros(count, bool),
        ranks=np.zeros((count, RANK_HISTORY), np.int64),
        rank_count=zeros,
        entropy_count=zeros,
        entropy_place=zeros,
        entropy_running=np.zeros(1),
        earlier_counts=np.zeros((count, CONFIRM_HISTORY - 1), np.int64),
        earlier_places=np.zeros((count, CONFIRM_HISTORY - 1), np.int64),
        sample=read,
        sample_owner=owner,
        sample_tokens=places,
        sample_arrived=arrived,
        eat_nats=eat,
        cost_tokens=cost,
        same_answer=same,
        empty_answer=empty,
        other_answer=is_other.astype(np.int64),
        seen=frozenset(row.name for row in rows),
        left_out={},
        policy=None,
    )


def found(base: Policy, rows: Sequence[Episode], goal: Goal) -> dict[str, Any]:
    """Calibrate on episodes. Return the number of judged `requests`, and the proved `rule` or `why` none is proved; and
    whether only later requests can prove one (`anew`). Where too few can be judged for any rule to be proved, the
    result has the number that is `missing` instead.

    base: the policy that holds for the requests without a rule found by itself.
    """
    # Of the rules that are tried, those with the longest lead read the earliest probes.
    earliest = {"eat_warmup_samples": 1, "confirm_sentence_ends": max(CONFIRMATIONS)}
    episodes = episodes_of(rows, _read_from(base, earliest, base.scheduler.min_think_tokens))
    judge = from_probes(episodes)
    replay = Replay(episodes, judge, base, DELAY_TOKENS)
    requests = int((~np.isnan(judge.natural)).sum())
    try:
        check_answers_differ(episodes)
    except AnswersAlikeError as error:
        return {"requests": requests, "why": str(error), "anew": True}
    if (missing := max(fewest(goal.attempt, goal.max_loss), 2 * MIN_REQUESTS) - requests) > 0:
        return {"requests": requests, "missing": missing}
    result = calibrate(replay, goal, families=[EAT_SENTENCE], unattended=True)
    if (point := result.recommended) is None:
        if result.best is None:
            why = "no rule that saves anything loses little enough on the half that chooses"
        else:
            bound = result.best.held_out.harm_bound
            why = f"{result.best.rule} may lose {percent(bound, 2)}, more than the allowed {percent(goal.max_loss, 2)}"
        return {"requests": requests, "why": why}
    if point.held_out.saved <= 0:
        return {"requests": requests, "why": f"{point.rule} saves nothing on the half that did not choose it"}
    policy = result.policy
    rule = {
        "text": str(point.rule),
        "entropy": {name: getattr(policy.entropy, name) for name in CHOSEN},
        "floor_tokens": max(base.scheduler.min_think_tokens, policy.scheduler.min_think_tokens),
        "bound": goal.max_loss,
        "saved": point.held_out.saved,
        "reference": [eat_bin.model_dump() for eat_bin in policy.entropy.eat_reference],
    }
    return {"requests": requests, "rule": rule}


def judged(base: Policy, rows: Sequence[Episode], entropy: dict[str, Any], floor_tokens: int) -> dict[str, Any]:
    """Judge a rule on episodes. Return the number of judged `requests`, how many answers the rule would have lost
    (`harmful`), and the `first` EAT in nats that the rule reads of each request that has one."""
    episodes = episodes_of(rows, _read_from(base, entropy, floor_tokens))
    judge = from_probes(episodes)
    replay = Replay(episodes, judge, base, DELAY_TOKENS)
    rule = stopping_rule(entropy)
    stops = replay.stops(rule)
    known = ~np.isnan(judge.natural)
    first = replay.first_samples(rule, 0)
    return {
        "requests": int(known.sum()),
        "harmful": int((np.isfinite(stops.at_tokens) & (stops.right < 1) & known).sum()),
        "first": [value for value in first.tolist() if math.isfinite(value)],
    }


def _read_from(base: Policy, entropy: dict[str, Any], floor_tokens: int) -> int:
    """Return the thinking tokens from which on a rule with these fields and this floor reads probes."""
    return floor_tokens - probe_lead_tokens(base.entropy.model_copy(update=entropy))


def stopping_rule(entropy: Mapping[str, Any]) -> StoppingRule:
    """Return the rule with these fields, which probes at all places that the episodes have."""
    at_all = eat_rule(EAT_SENTENCE, 0.0)
    return replace(at_all, entropy={**at_all.entropy, **entropy})


def work(task: dict[str, Any]) -> dict[str, Any]:
    """Do a task: to judge its `rule`, or else to find one. Of several episodes of one request the newest counts."""
    by_name = {episode.name: episode for episode in map(Episode.from_json, task["episodes"])}
    base, rows = Policy.model_validate_json(task["base"]), [*by_name.values()]
    if "rule" in task:
        return judged(base, rows, task["rule"]["entropy"], task["rule"]["floor_tokens"])
    return found(base, rows, Goal(task["max_loss"], attempt=task["attempt"]))


def _bound_memory() -> None:
    """Let a calibration that needs more than MOST_BYTES fail by itself, before the kernel ends the whole container, in
    which the control plane would try the same again after each restart."""
    # Other systems than Linux have no such file, and a limit that is lower already stays.
    with suppress(FileNotFoundError, ValueError):
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MOST_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))


def run() -> None:
    os.nice(10)
    _bound_memory()
    task = json.loads(sys.stdin.readline())
    json.dump(work(task | {"episodes": list(sys.stdin)}), sys.stdout)


if __name__ == "__main__":
    run()
