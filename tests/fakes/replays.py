"""Made-up requests and their replays, for the tests of calibration."""

from __future__ import annotations

import pickle
from pathlib import Path

from meridian_control.offline.calibration import Calibration, Goal
from meridian_control.offline.correctness import from_labels, from_probes
from meridian_control.offline.episodes import Episodes, collect
from meridian_control.offline.halves import halved
from meridian_control.offline.rule_replay import Replay
from meridian_control.policy import model as schema
from meridian_control.policy.model import Policy
from tests.fakes import traces

REQUESTS = 120
# A loss that so many requests can prove: with 60 in a half and none harmed, the bound is 4.9 per cent.
GOAL = Goal(max_loss=0.1)
# Each recording as a file, and what is read from it, by its requests and its policy. Many tests have the same ones.
_recordings: dict[bytes, tuple[bytes, Episodes]] = {}


def made(count: int = REQUESTS, **kinds: str) -> list[traces.MadeUp]:
    return [traces.made_up(n, **kinds) for n in range(count)]  # type: ignore[arg-type]


def recorded_in(folder: Path, requests: list[traces.MadeUp], policy: Policy | None = None) -> Episodes:
    """Write a recording of these requests to `a.trace`, and return what is read from it. policy: as for a replay."""
    folder.mkdir(exist_ok=True)
    path, key = folder / "a.trace", pickle.dumps((requests, policy))
    if key in _recordings:
        path.write_bytes(_recordings[key][0])
    else:
        episodes = collect([traces.write(path, traces.records(requests, policy=policy))])
        _recordings[key] = path.read_bytes(), episodes
    return _recordings[key][1]


def replay(
    folder: Path,
    requests: list[traces.MadeUp],
    labelled: bool = True,
    base: Policy | None = None,
    recorded: Policy | None = None,
) -> Replay:
    """Return the replay of a recording. recorded: the policy in force while recording; None for the default."""
    episodes = recorded_in(folder, requests, recorded)
    judge = from_probes(episodes)
    if labelled:
        judge = from_labels(traces.write_labels(folder / "labels.jsonl", requests), episodes)
    return Replay(episodes, judge, base or schema.Policy(), delay_tokens=2)


def second_half(replayed: Replay, split: int = 0) -> set[str]:
    """Return the ids of the requests that choose no rule."""
    ids = replayed.episodes.ids
    return {ids[number] for number in halved(ids, replayed.judge, split)[1]}


def separating(found: Calibration) -> set[str]:
    return {s.signal for s in found.separations if not s.why_not}
