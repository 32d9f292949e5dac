"""ThinkBrake (arXiv 2510.00546), which ends thinking where the end marker is hardly less likely than the likeliest
token, tried on a recording.

Its signal is the margin: the log-probability of the likeliest token minus that of the end marker, in nats.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from meridian_control.common.table_columns import CONFIRM_HISTORY
from meridian_control.engine.request_table import THINK
from meridian_control.engine.token_rows import FLAG_MARKER
from meridian_control.journal.request_ids import shortened
from meridian_control.offline import trace_file
from meridian_control.offline.candidates import GRID, LAXER, quantiles
from meridian_control.offline.episodes import newest_values
from meridian_control.offline.rule_replay import StoppingRule
from tests.bench import code_stop
from tests.bench.calibrate import TRACE
from tests.bench.code_stop import Recorded

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

FAMILY = "ThinkBrake: margin at marks"


@dataclass(frozen=True)
class MarginRule(StoppingRule):
    """Ends thinking at a sentence end where the margin is at most `max_nats`, as often in a row as `confirm` says."""

    max_nats: float = 0.0
    confirm: int = 1

    def __str__(self) -> str:
        return f"margin <= {self.max_nats:g} nats" + (f", {self.confirm} times in a row" if self.confirm > 1 else "")


def laxer(rule: StoppingRule) -> StoppingRule:
    """Return the rule with every threshold loosened as calibration loosens them."""
    return replace(rule, max_nats=LAXER * rule.max_nats) if isinstance(rule, MarginRule) else code_stop.laxer(rule)


class AtMarks(Recorded):
    """A recording with the margins at the newest sentence ends, newest first, [boundaries, CONFIRM_HISTORY]; NaN for
    none."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        episodes, by_place = self.episodes, _margins(folder / TRACE, set(self.episodes.ids))
        places = zip(episodes.owner, episodes.decided_tokens.tolist(), strict=True)
        margins = np.array([by_place[episodes.ids[number], tokens] for number, tokens in places])
        self.margins = newest_values(episodes.owner, margins, CONFIRM_HISTORY)

    def _fires(self, rule: StoppingRule) -> tuple[NDArray[Any], ...]:
        if not isinstance(rule, MarginRule):
            return super()._fires(rule)
        episodes = self.episodes
        fires = (self.margins[:, : rule.confirm] <= rule.max_nats).all(axis=1)
        places = episodes.decided_tokens + self._late
        return self._first(episodes.owner, np.flatnonzero(fires)), places, self.right, episodes.decided_tokens


def _margins(trace: Path, names: set[str]) -> dict[tuple[str, int], float]:
    """Return the margin at each thinking token, by the request's name and the number of its thinking tokens."""
    margins: dict[tuple[str, int], float] = {}
    slots, thought = dict[int, str](), Counter[str]()
    for record in trace_file.read(trace):
        for opened in (*record.up.snapshot.requests, *record.up.step.opened):
            slots[opened.slot] = next((n for n in shortened(opened.request_id) if n in names), "")
        rows = record.up.step.tokens
        columns = rows.slot, rows.phase, rows.flags, rows.top_logprob_nats, rows.end_logprob_nats
        for slot, phase, flags, top, end in zip(*columns, strict=True):
            if phase == THINK and not flags & FLAG_MARKER:
                thought[slots[slot]] += 1
                margins[slots[slot], thought[slots[slot]]] = top - end
    return margins


def candidates(replay: AtMarks, requests: NDArray[np.intp]) -> list[MarginRule]:
    """Return rules with thresholds from these requests' values."""
    levels = quantiles(replay.margins[np.isin(replay.episodes.owner, requests), 0], GRID)
    numbers = range(1, CONFIRM_HISTORY + 1)
    return [MarginRule(FAMILY, max_nats=level, confirm=number) for level, number in product(levels, numbers)]
