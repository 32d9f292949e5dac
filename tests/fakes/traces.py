"""Traces of made-up requests, as the messages that a real agent sends, and labels for the correctness of their
answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.timestamp_pb2 import Timestamp
from meridian.v1 import agent_pb2, fleet_pb2

from meridian_control.engine.request_table import OUTPUT, THINK
from meridian_control.engine.token_rows import FLAG_END, FLAG_FORCED, FLAG_MARKER
from meridian_control.offline.trace_file import TraceWriter
from meridian_control.policy import formats as forms
from meridian_control.policy import model as schema
from tests.fakes.agent import hello

SENTENCE, PARAGRAPH = 32, 96
STOP = agent_pb2.FINISH_REASON_STOP
# Number of steps until a probe's result is reported.
PROBE_STEPS = 2


@dataclass
class MadeUp:
    """One request: its rows (phase, flags, entropy, rank), the trial answers at its sentence ends, and the number of
    thinking tokens from which its answer is right."""

    request_id: str
    rows: list[tuple[int, int, float, int]] = field(default_factory=list)
    # EAT and the number of probes in a row with the same answer, by thinking tokens.
    probes: dict[int, tuple[float, int]] = field(default_factory=dict)
    settled_tokens: int = 0
    natural_right: bool = True
    finish: agent_pb2.FinishReason.ValueType = STOP
    unmeasured: bool = False

    def labels(self, delay_tokens: int = 2) -> Iterator[dict[str, Any]]:
        yield {"request_id": self.request_id, "correct": self.natural_right}
        for tokens in self.probes:
            right = self.natural_right and tokens >= self.settled_tokens
            yield {"request_id": self.request_id, "think_tokens": tokens + delay_tokens, "correct": right}


def made_up(
    number: int,
    seed: int = 0,
    eat: str = "tells",
    rank: str = "tells",
    *,
    forced: bool = False,
    same: str = "tells",
) -> MadeUp:
    """Return a request that settles on its answer part-way.

    `eat`, `rank` and `same` (equal trial answers in a row) say whether a signal `tells` when the answer is settled, is
    `blind` to it, or is `noise`.
    """
    one = _made_up(number, seed, eat, rank, forced=forced, same=same)
    return replace(one, rows=list(one.rows), probes=dict(one.probes))


@cache
def _made_up(number: int, seed: int, eat: str, rank: str, *, forced: bool, same: str) -> MadeUp:
    rng = np.random.default_rng((seed, number))
    sentences = int(rng.integers(12, 40))
    settled = int(sentences * rng.uniform(0.3, 0.8))
    request = MadeUp(f"r{number}-{rng.integers(1 << 30):08x}", natural_right=bool(rng.random() < 0.9))
    tokens, low, run = 0, False, 0
    for sentence in range(sentences):
        length = int(rng.integers(6, 20))
        for token in range(length):
            flags = 0
            if token == length - 1:
                flags = PARAGRAPH if sentence % 4 == 3 else SENTENCE
            value = _rank(rng, rank, low) if token == 0 and sentence else int(rng.integers(500, 5000))
            request.rows.append((THINK, flags, float(rng.exponential(0.5)), value))
        tokens += length
        low = sentence >= settled
        if sentence == settled:
            request.settled_tokens = tokens
        # Before the request settles, an answer lasts for a sentence or two.
        changes = sentence == settled or (not low and rng.random() < 0.6) if same == "tells" else rng.random() < 0.5
        run = 1 if changes else run + 1
        request.probes[tokens] = (_eat(rng, eat, low), run)
    request.rows.append((THINK, FLAG_MARKER | FLAG_END | (FLAG_FORCED if forced else 0), 0.1, 1))
    request.rows += [(OUTPUT, 0, 0.1, 4000)] * 3
    return request


def hopeless(number: int, **kinds: Any) -> MadeUp:
    """Return a long request whose EAT and end-marker ranks stay high, and whose answer is never right."""
    request = made_up(number, **kinds)
    rng = np.random.default_rng((number, 2))
    longer = made_up(number + 10_000, **kinds).rows[:-4]
    rows = longer + request.rows
    # The end marker stays unlikely until the end itself.
    request.rows = [(phase, flags, nats, rank if flags & FLAG_END else 3000) for phase, flags, nats, rank in rows]
    request.natural_right, request.probes, tokens = False, {}, 0
    for phase, flags, *_ in request.rows:
        tokens += phase == THINK and not flags & FLAG_MARKER
        if flags & SENTENCE:
            request.probes[tokens] = (float(rng.uniform(2.2, 3.0)), 1)
    return request


def _eat(rng: np.random.Generator, kind: str, low: bool) -> float:
    if kind == "blind":
        return float(rng.exponential(0.01))
    if kind == "noise":
        return float(rng.uniform(0, 2))
    return float(rng.exponential(0.05)) if low else float(rng.uniform(0.3, 2))


def _rank(rng: np.random.Generator, kind: str, low: bool) -> int:
    if kind != "tells":
        return int(rng.integers(1, 1000))
    return int(rng.integers(1, 12)) if low else int(rng.integers(8, 1000))


def records(
    requests: list[MadeUp], at_once: int = 8, policy: schema.Policy | None = None
) -> list[fleet_pb2.TraceRecord]:
    """Return one session in which these requests run, some at once, with one token a step."""
    made: list[fleet_pb2.TraceRecord] = []
    time = Timestamp()
    time.FromDatetime(datetime(2026, 5, 4, tzinfo=UTC))

    def add(**message: Any) -> fleet_pb2.TraceRecord:
        made.append(fleet_pb2.TraceRecord(time=time, engine_id="engine", session_id="s", **message))
        return made[-1]

    add(up=agent_pb2.ConnectRequest(hello=hello()))
    add(policy=fleet_pb2.TracedPolicy(revision=1, policy=forms.to_proto(policy or schema.Policy())))
    add(up=agent_pb2.ConnectRequest(snapshot=agent_pb2.Snapshot(step=1)))
    waiting, live, free = list(requests), dict[int, tuple[MadeUp, int, int]](), list(range(at_once))
    due: list[tuple[int, int, int, MadeUp]] = []
    step = 1
    while waiting or live:
        step += 1
        report = agent_pb2.StepReport(step=step, steps=1, step_time_ms=5)
        while waiting and free:
            slot, request = free.pop(0), waiting.pop(0)
            live[slot] = request, 0, 0
            named = report.opened.add(slot=slot, request_id=request.request_id, phase=agent_pb2.PHASE_THINK, model="m")
            named.unmeasured = request.unmeasured
        slots = sorted(live)
        _add_rows(report.tokens, slots, [live[slot][0].rows[live[slot][1]] for slot in slots])
        for slot in slots:
            request, at, tokens = live[slot]
            phase, flags, *_ = request.rows[at]
            tokens += phase == THINK and not flags & FLAG_MARKER
            live[slot] = request, at + 1, tokens
            if phase == THINK and flags & SENTENCE:
                due.append((step + PROBE_STEPS, slot, tokens, request))
        for when, slot, tokens, request in [d for d in due if d[0] <= step]:
            due.remove((when, slot, tokens, request))
            if slot in live and live[slot][0] is request:
                add_probe(report.probes, slot, tokens, *request.probes[tokens])
        for slot in [s for s, (request, at, _) in live.items() if at == len(request.rows)]:
            report.closed.add(slot=slot, reason=live.pop(slot)[0].finish)
            free.append(slot)
        add(up=agent_pb2.ConnectRequest(step=report))
    return made


def _add_rows(columns: agent_pb2.TokenColumns, slots: list[int], rows: list[tuple[int, int, float, int]]) -> None:
    columns.slot.extend(slots)
    phases, flags, entropies, ranks = zip(*rows, strict=True) if rows else ((), (), (), ())
    columns.phase.extend(phases)
    columns.flags.extend(flags)
    columns.entropy_nats.extend(entropies)
    columns.end_rank.extend(ranks)
    columns.end_logprob_nats.extend([-float(rank) for rank in ranks])


def add_probe(  # noqa: PLR0917
    columns: agent_pb2.ProbeColumns, slot: int, tokens: int, eat: float, same: int, decision_id: int = 1
) -> None:
    columns.decision_id.append(decision_id)
    columns.slot.append(slot)
    columns.think_tokens.append(tokens)
    columns.eat_nats.append(eat)
    columns.cost_tokens.append(3)
    columns.same_answer.append(same)
    columns.empty_answer.append(False)


def write(path: Path, made: list[fleet_pb2.TraceRecord]) -> Path:
    with TraceWriter(path) as out:
        for record in made:
            out.write(record)
    return path


def write_labels(path: Path, requests: list[MadeUp], delay_tokens: int = 2) -> Path:
    rows = [json.dumps(row) for request in requests for row in request.labels(delay_tokens)]
    path.write_text("\n".join(rows) + "\n")
    return path
