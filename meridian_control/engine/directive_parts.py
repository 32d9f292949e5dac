"""Splits large Directives into messages that gRPC accepts. All functions are pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meridian.v1 import agent_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator

# Largest number of bytes of Directives; gRPC accepts four times as many. A plan, which stays whole, has at most 8 bytes
# for each request of the largest engine.
DIRECTIVES_BYTES = 1 << 20
# Lists of decisions in the order in which an agent takes them in, which is that of the fields; the plan comes last.
KINDS = tuple(field.name for field in agent_pb2.Directives.DESCRIPTOR.fields if field.is_repeated)


def parts_of(directives: agent_pb2.Directives) -> list[agent_pb2.ConnectResponse]:
    """Return the same decisions, in the order in which an agent takes them in, as messages of at most DIRECTIVES_BYTES
    each."""
    return [agent_pb2.ConnectResponse(directives=part) for part in _parts(directives)]


def _parts(directives: agent_pb2.Directives) -> Iterator[agent_pb2.Directives]:
    part = agent_pb2.Directives(step=directives.step)
    used = empty = part.ByteSize()
    for kind in KINDS:
        for decision in getattr(directives, kind):
            size = decision.ByteSize() + 8
            if used + size > DIRECTIVES_BYTES and used > empty:
                yield part
                part, used = agent_pb2.Directives(step=directives.step), empty
            getattr(part, kind).append(decision)
            used += size
    if directives.HasField("plan"):
        if used + directives.plan.ByteSize() + 8 > DIRECTIVES_BYTES and used > empty:
            yield part
            part = agent_pb2.Directives(step=directives.step)
        part.plan.CopyFrom(directives.plan)
    yield part
