"""How times, shares and phases look wherever people read them: in logs, in the tables of `meridianctl`, on plots and
dashboards. The status page follows in `page/static`, and `tests/unit/control/common/test_look.py` compares its
colours."""

from __future__ import annotations

from datetime import UTC, datetime

from meridian.v1 import agent_pb2

# Colours of the phases on a light ground, where both have a contrast of at least 5 to 1.
THINKING_COLOUR, ANSWERING_COLOUR = "#6b4fbb", "#0b7a4b"
# What a request does in a phase.
PHASE_WORDS = {
    agent_pb2.PHASE_PROMPT: "reading the prompt",
    agent_pb2.PHASE_THINK: "thinking",
    agent_pb2.PHASE_OUTPUT: "answering",
}


def phase_text(phase: agent_pb2.Phase.ValueType) -> str:
    return PHASE_WORDS.get(phase, "phase unknown")


def time_text(time: datetime) -> str:
    """Return a time that knows its zone as ISO 8601 in UTC with milliseconds, such as 2026-01-31T12:00:00.250Z."""
    return time.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def counted(count: int, what: str) -> str:
    """Return a number with what it counts, such as `1 engine` or `1,024 tokens`. what: the word for one of them."""
    return f"{count:,} {what}{'s'[: count != 1]}"


def percent(share: float, digits: int = 1) -> str:
    """Return a share as percentage, such as `66.7 %`."""
    return f"{100 * share:.{digits}f} %"
