"""Watch what the agent sends while a test runs, without changing it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from meridian_agent.core.step_record import MeasuredProbe, StepRecord
from meridian_agent.core.step_signals import StepSignals


@contextlib.contextmanager
def records(agent: Any) -> Iterator[list[Any]]:
    """Yield a list that gets the step records sent inside the block."""
    seen: list[Any] = []
    outbox = agent.link.outbox
    send, send_text = outbox.send, outbox.send_text

    def watch(record: Any, snapshot: Any) -> None:
        record.spread()
        seen.append((record, list(record.opened), list(record.slots), list(record.closed)))
        send(record, snapshot)

    def watch_text(step: Any) -> bool:
        if sent := send_text(step):
            record = StepRecord(*step)
            record.spread()
            seen.append((record, [], record.slots, []))
        return bool(sent)

    outbox.send, outbox.send_text = watch, watch_text
    try:
        yield seen
    finally:
        outbox.send, outbox.send_text = send, send_text


def probes(seen: list[Any]) -> dict[str, list[MeasuredProbe]]:
    """Return the probes of each request id in order, as StepRecord has them."""
    request_of: dict[int, str] = {}
    found: dict[str, list[MeasuredProbe]] = {}
    for record, opened, _, closed in seen:
        for slot, info, *_ in opened:
            request_of[slot] = info.request_id
        for probe in record.probes:
            found.setdefault(request_of[probe.slot], []).append(probe)
        for slot, _ in closed:
            request_of.pop(slot, None)
    return found


def rows(seen: list[Any]) -> dict[str, list[tuple[int, int, float, int, float, float]]]:
    """Return the token rows of each request id in order: (phase, flags, entropy, end rank, end log-probability, end
    margin)."""
    request_of: dict[int, str] = {}
    found: dict[str, list[tuple[int, int, float, int, float, float]]] = {}
    for record, opened, slots, closed in seen:
        for slot, info, *_ in opened:
            request_of[slot] = info.request_id
        flags = record.row_flags()
        for i, slot in enumerate(slots):
            at = record.rows[i]
            s = None if record.told is None else StepSignals.decode(record.told)
            measured = (float("nan"), 0, float("nan"), float("nan"))
            if s is not None:
                end_logprob, top_logprob = float(s.end_logprob_nats[at]), float(s.top_logprob_nats[at])
                measured = float(s.entropy_nats[at]), int(s.end_rank[at]), end_logprob, top_logprob - end_logprob
            found.setdefault(request_of[slot], []).append((record.phases[i], flags[i], *measured))
        for slot, _ in closed:
            request_of.pop(slot, None)
    return found
