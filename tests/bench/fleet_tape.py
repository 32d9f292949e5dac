"""Make tapes: the reports of simulated engines whose requests come and go, encoded once and played by many streams.

The module runs the agent's real tracker and its real encoding of reports over made-up tokens, and
merges steps as the agent's link does. A tape has everything of a report that no decision changes; `fleet_engines` adds
the step's number, outcomes and results of probes. The code does no I/O and reads no clock.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, TypeAlias
from unittest.mock import patch

import numpy as np
from meridian.v1 import agent_pb2

from meridian_agent.core import tracker as tracker_module
from meridian_agent.core.phases import Phase
from meridian_agent.core.request_info import RequestInfo
from meridian_agent.core.step_record import COUNTERS, StepRecord
from meridian_agent.core.step_signals import StepSignals
from meridian_agent.link.messages import mergeable, step_report
from meridian_agent.worker.observer import SENT, ChosenRows
from meridian_control.engine.settings_delivery import MEASURED_CLUSTER, USUAL_INTERVAL_STEPS
from tests.fakes.engine import END, START, TEXT, FakeEngine
from tests.fakes.sentences import ends_by_id

# Tokens of thinking and of the answer of a request, drawn uniformly.
THINK, ANSWER = (200, 2000), (20, 200)
# Tokens that end a sentence and a paragraph, their flags, and the number of thinking tokens between two of each.
SENTENCE, PARAGRAPH = (91, 32, 24), (92, 96, 96)
MAX_TOKENS, PROMPT_TOKENS = 8192, 500
# A policy's decisions about signals differ from step to step, so the signals of this many steps take turns.
SIGNALS = 16
# Steps before the tape begins, after which the requests are of all ages; and steps of a tape.
BEFORE, STEPS = 1200, 1200
# State of a slot: number of its request, phase, thinking tokens, answer tokens, and whether it is measured.
Slot: TypeAlias = tuple[int, int, int, int, bool]
NO_SLOT: Slot = 0, 0, 0, 0, False
# Stands for the engine's number in the request ids of a tape, so that ids differ from engine to engine.
ENGINE = "~~~~~~"


@dataclass(frozen=True, slots=True)
class Report:
    """One report of a tape, and the engine's requests after it.

    body: the encoded report without what is added when it is sent. opened, ended, closed: slots of requests that begin,
    end their thinking, and end. numbers, phases, thinks, answers, measured: of the request of each slot.
    """

    steps: int
    body: bytes
    opened: tuple[int, ...]
    ended: tuple[int, ...]
    closed: tuple[int, ...]
    numbers: tuple[int, ...]
    phases: tuple[int, ...]
    thinks: tuple[int, ...]
    answers: tuple[int, ...]
    measured: tuple[bool, ...]

    def snapshot(self, engine: str, step: int) -> agent_pb2.Snapshot:
        """Return a snapshot of the requests after the report. engine: as many characters as ENGINE has."""
        found = agent_pb2.Snapshot(step=step)
        for slot, number in enumerate(self.numbers):
            if slot in self.closed:
                # The next report opens the request that follows.
                continue
            found.requests.add(
                slot=slot,
                request_id=request_id(number).replace(ENGINE, engine),
                model="m",
                tenant="tenant",
                slo_class="slo",
                prompt_tokens=PROMPT_TOKENS,
                max_tokens=MAX_TOKENS,
                phase=self.phases[slot],
                think_tokens=self.thinks[slot],
                output_tokens=self.answers[slot],
                unmeasured=not self.measured[slot],
            )
        return found

    def spread(self) -> Report:
        """Return a report of one step in which the request of slot n generates n tokens.

        All requests of a snapshot are probed at once, and again after the same number of tokens. After this report
        their probes come due one after another, as those of requests that began one after another.
        """
        columns = agent_pb2.TokenColumns()
        for slot in set(range(len(self.numbers))) - set(self.closed):
            columns.slot.extend([slot] * slot)
            columns.phase.extend([self.phases[slot]] * slot)  # type: ignore[list-item]
            measured = self.measured[slot]
            columns.entropy_nats.extend([0.5 if measured else math.nan] * slot)
            columns.end_rank.extend([500 if measured else 0] * slot)
            columns.end_logprob_nats.extend([-5.0 if measured else math.nan] * slot)
            columns.top_logprob_nats.extend([-0.5 if measured else math.nan] * slot)
        columns.flags.extend([0] * len(columns.slot))
        report = agent_pb2.StepReport(steps=1, running=len(self.numbers), tokens=columns)
        return replace(self, steps=1, body=report.SerializeToString(), opened=(), ended=(), closed=())


def request_id(number: int) -> str:
    return f"fleet-{ENGINE}-{number}"


def made(
    seed: int,
    requests: int,
    step_ms: float,
    steps: int = STEPS,
    before: int = BEFORE,
    *,
    sparse: bool = True,
    measured_share: float = 1.0,
) -> list[Report]:
    """Return the reports of an engine with `requests` running requests over `steps` steps, after `before` others.
    sparse: whether the control plane reads sparse columns. measured_share: share of the requests that the engine
    measures.

    A slot is used again at once, so that the requests have as many slots as there are requests.
    """
    with patch.object(tracker_module, "RESTING_SLOTS", 0):
        engine, found = _Engine(seed, requests, step_ms, measured_share), list[Report]()
        for _ in range(before):
            engine.step()
        for records in merged(engine.step() for _ in range(steps)):
            found.append(engine.report(records, sparse))
    return found


def merged(records: Iterable[StepRecord]) -> Iterator[list[StepRecord]]:
    """Yield the records of each report, merged as the agent's link merges them if the network is fast."""
    waiting: list[StepRecord] = []
    for record in records:
        if waiting and not mergeable(waiting, record):
            yield waiting
            waiting = []
        waiting.append(record)
        if len(waiting) >= USUAL_INTERVAL_STEPS or record.presses:
            yield waiting
            waiting = []


def signals(requests: int, seed: int) -> list[Any]:
    """Return the encoded signals of some steps with a row for each request."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(SIGNALS):
        entropy = rng.exponential(0.5, requests).astype(np.float32)
        rank = rng.integers(50, 5000, requests).astype(np.int32)
        found.append(StepSignals(None, entropy, rank, (-rank / 100).astype(np.float32), -entropy).encode())
    return found


def of_rows(encoded: bytes, rows: Sequence[bool]) -> bytes | None:
    """Return a step's signals as the worker sends them if it measures only these rows; None if it measures none."""
    if not len(chosen := np.flatnonzero(rows)):
        return None
    columns = ChosenRows(len(rows), chosen.astype(np.int32)).blank
    columns[:, chosen] = np.frombuffer(encoded, np.float32).reshape(len(SENT), -1)[:, chosen]
    return columns.tobytes()


class _Engine:
    """An engine with all its places taken: a request begins whenever one has ended."""

    def __init__(self, seed: int, requests: int, step_ms: float, measured_share: float) -> None:
        self._rng, self._engine, self._step_ms = random.Random(seed), FakeEngine(), step_ms
        flags = bytearray(PARAGRAPH[0] + 1)
        flags[SENTENCE[0]], flags[PARAGRAPH[0]] = SENTENCE[1], PARAGRAPH[1]
        self._engine.tracker.sentences = ends_by_id(bytes(flags))
        self._engine.tracker.measure(measured_share, MEASURED_CLUSTER)
        # As under the default policy.
        self._engine.tracker.merge_openings = self._engine.tracker.merge_answers = True
        self._signals, self._opened = signals(requests, seed), 0
        # Thinking tokens and answer tokens of each live request, and its number, by name.
        self._lengths: dict[str, tuple[int, int]] = {}
        self._numbers: dict[str, int] = {}
        # State of each slot now and after each step that is in no report yet.
        self._slots, self._after = [NO_SLOT] * requests, dict[int, tuple[Slot, ...]]()
        for _ in range(requests):
            self._open(self._rng.random())

    def _open(self, left: float = 1.0) -> None:
        self._opened += 1
        name = request_id(self._opened)
        self._numbers[name] = self._opened
        self._lengths[name] = max(1, int(left * self._rng.randint(*THINK))), self._rng.randint(*ANSWER)
        info = RequestInfo(name, "m", "tenant", "slo", PROMPT_TOKENS, MAX_TOKENS, None)
        ref = SimpleNamespace(is_prefill_chunk=False, num_computed_tokens=PROMPT_TOKENS)
        self._engine.tracker.open(info, [START], self._engine.step, ref)

    def step(self) -> StepRecord:
        """Run one step of a token for each request; return its record."""
        engine, ended = self._engine, []
        engine.schedule()
        unmeasured = engine.tracker.unmeasured_ids
        rows = [name not in unmeasured for name in engine.live]
        for name, live in list(engine.live.items()):
            state, (think, answer) = live.state, self._lengths[name]
            wanted, tokens = TEXT, state.think_tokens
            if state.phase is Phase.THINK:
                ends = PARAGRAPH[0] if tokens % PARAGRAPH[2] == 0 else SENTENCE[0]
                wanted = END if tokens >= think else ends if tokens % SENTENCE[2] == 0 else TEXT
            elif state.output_tokens >= answer:
                ended.append(name)
            engine.feed(name, [wanted])
            state = live.state
            counts = state.think_tokens, state.output_tokens
            self._slots[live.slot] = self._numbers[name], int(state.phase), *counts, live.measured
        record = engine.tracker.record
        record.rows = list(range(len(record.slots)))
        record.told = of_rows(self._signals[engine.step % SIGNALS], rows)
        record.step_time_ms, record.counters = self._step_ms, (1,) * len(COUNTERS)
        record.ended_s = engine.step * self._step_ms / 1e3
        for name in ended:
            engine.finish(name)
            del self._lengths[name], self._numbers[name]
        record = engine.take()
        self._after[record.step] = tuple(self._slots)
        # The fake keeps everything, for tests.
        engine.records.clear()
        for _ in ended:
            self._open()
        return record

    def report(self, records: Sequence[StepRecord], sparse: bool) -> Report:
        """Return the report of some records, the oldest that are in no report yet."""
        message = step_report(records, sparse)
        message.ClearField("step")
        # Without these columns the last step made all entries that are added.
        for name in ("probes", "preempted", "resumed", "outcomes") if message.HasField("merged") else ():
            message.merged.ClearField(name)
        rows = [row for record in records for row in zip(record.slots, record.row_flags(), strict=True)]
        after = [self._after.pop(record.step) for record in records][-1]
        numbers, phases, thinks, answers, in_sample = zip(*after, strict=True)
        return Report(
            steps=len(records),
            body=message.SerializeToString(),
            opened=tuple(opened.slot for opened in message.opened),
            ended=tuple(slot for slot, flags in rows if flags & agent_pb2.TOKEN_FLAG_END),
            closed=tuple(closed.slot for closed in message.closed),
            numbers=numbers,
            phases=phases,
            thinks=thinks,
            answers=answers,
            measured=in_sample,
        )
