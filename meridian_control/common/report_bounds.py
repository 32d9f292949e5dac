"""Bounds of the numbers that an agent reports.

A number that no correct agent can report would stay in the counters, averages and graphs of the whole fleet, so it ends
the stream as the agent's fault. A measurement that may be wrong on a healthy engine is left out instead: a clock that
takes it may be set back. The numbers of tokens' signals, and the other columns of merged steps, are checked where they
are read. Pure.
"""

from __future__ import annotations

from itertools import repeat
from operator import attrgetter, ge, le
from typing import TYPE_CHECKING

from meridian_control.common.errors import BadReport, InvalidRequest
from meridian_control.common.opened_request import MAX_COUNT

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from meridian.v1 import agent_pb2

# Largest duration, in milliseconds and in seconds, and largest count: those up to it are exact as floating-point
# numbers.
MAX_MS, MAX_S, MAX_EXACT = 1e9, 1e10, 2**53
COUNTERS = (
    *("preempted_think", "output_critical", "blocks_reclaimed", "blocks_expired", "think_skips"),
    *("reports_dropped", "probe_tokens", "calm_steps", "full_steps", "recomputed_tokens"),
)
# Largest number of steps between a decision and the step that carries it out.
MAX_AGE_STEPS = 10**9
# Smallest and largest value of each number of a StepReport that is refused outside of them, by its path. The columns of
# `merged` have such numbers.
REFUSED: dict[str, tuple[float, float]] = {
    "step": (0, MAX_EXACT),
    "step_time_ms": (0, MAX_MS),
    "kv_used": (0, 1),
    "running": (0, MAX_COUNT),
    "waiting": (0, MAX_COUNT),
    "prefill_tokens": (0, MAX_COUNT),
    "merged.step_time_ms": (0, MAX_MS),
    "merged.prefill_tokens": (0, MAX_COUNT),
    "counters.agent_seconds": (0, MAX_S),
    "counters.worker_seconds": (0, MAX_S),
    "counters.thread_seconds": (0, MAX_S),
    "counters.scheduler_seconds": (0, MAX_S),
    "counters.round_trip_ms": (0, MAX_MS),
    **{f"counters.{name}": (0, MAX_EXACT) for name in COUNTERS},
}
_OWN = [path for path in REFUSED if "." not in path]
_COUNTED = [path for path in REFUSED if path.startswith("counters.")]
_COLUMNS = [path for path in REFUSED if path.startswith("merged.")]
_own, _counted, _columns = (
    attrgetter(*(path.rpartition(".")[2] for path in paths)) for paths in (_OWN, _COUNTED, _COLUMNS)
)
_PATHS = (*_OWN, *_COUNTED)
_LOW, _HIGH = ([REFUSED[path][side] for path in _PATHS] for side in (0, 1))
# Smallest and largest value of each measurement that is left out outside of them, by its path.
LEFT_OUT: dict[str, tuple[float, float]] = {
    "joined.queueing_ms": (0, MAX_MS),
    "continued.first_token_ms": (0, MAX_MS),
    # The entropy of any vocabulary is far below, and rounding may bring it just below 0.
    "probes.eat_nats": (-1, 100),
}
# Bounds for the bytes of a Hello, and for the characters of ids, which appear in logs and as labels of metrics.
MAX_HELLO_BYTES, MAX_ID_CHARS = 64 << 10, 512


def check_hello(hello: agent_pb2.Hello) -> None:
    """Raise InvalidRequest if an id of the Hello is empty or too long, or if the message is too large."""
    if not hello.engine_id:
        raise InvalidRequest("hello.engine_id", "must not be empty")
    for name in ("engine_id", "incarnation"):
        said = getattr(hello, name)
        if len(said) > MAX_ID_CHARS or not said.isprintable():
            raise InvalidRequest(
                f"hello.{name}", f"must have at most {MAX_ID_CHARS} characters, all printable; got {said[:20]!a}"
            )
    if (size := hello.ByteSize()) > MAX_HELLO_BYTES:
        raise InvalidRequest("hello", f"must be at most {MAX_HELLO_BYTES} bytes; got {size}")


def check_step(step: int) -> None:
    """Raise BadReport if the number of a snapshot's step is out of its bounds."""
    _check(["step"], [step], [0], [MAX_EXACT])


def check(report: agent_pb2.StepReport) -> None:
    """Raise BadReport, which names the field and the value, if a number of the report is out of its bounds."""
    _check(_PATHS, (*_own(report), *_counted(report.counters)), _LOW, _HIGH)
    if report.HasField("merged"):
        for path, column in zip(_COLUMNS, _columns(report.merged), strict=True):
            low, high = REFUSED[path]
            _check(repeat(path), column[:], repeat(low), repeat(high))


def _check(paths: Iterable[str], values: Sequence[float], low: Iterable[float], high: Iterable[float]) -> None:
    # Nearly all reports are correct, and this is the cheapest way to see it.
    if not (all(map(le, low, values)) and all(map(ge, high, values))):
        for path, value in zip(paths, values, strict=False):
            least, most = REFUSED[path]
            if not least <= value <= most:
                raise BadReport(f"{path} must be in [{least:g}, {most:g}]; got {value:g}")


def is_measured(path: str, value: float) -> bool:
    """Return whether a measurement is within its bounds."""
    low, high = LEFT_OUT[path]
    return low <= value <= high
