"""The fuzz targets by name: how a case is made from a seed, run, and written to and read from the corpus."""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from meridian.v1 import fleet_pb2

from tests.fuzz import agent, control, parsers

CORPUS = Path(__file__).parent.parent / "data" / "fuzz"
BETWEEN = "---\n"


@dataclass(frozen=True)
class Target:
    """A fuzz target. dump, load: a case as the bytes of its corpus file. smaller: yields smaller cases."""

    name: str
    make: Callable[[random.Random], Any]
    run: Callable[[Any], None]
    dump: Callable[[Any], bytes]
    load: Callable[[bytes], Any]
    smaller: Callable[[Any], Iterator[Any]]

    def case(self, seed: int) -> Any:
        return self.make(random.Random(f"{self.name} {seed}"))

    def corpus(self) -> list[Path]:
        return sorted((CORPUS / self.name).iterdir())

    def reduced(self, case: Any) -> Any:
        """Return the smallest case found that still fails in the same place."""
        error = self.failure(case)
        while error is not None:
            fails = (smaller for smaller in self.smaller(case) if where(self.failure(smaller)) == where(error))
            if (found := next(fails, None)) is None:
                break
            case = found
        return case

    def failure(self, case: Any) -> Exception | None:
        try:
            self.run(case)
        except Exception as error:
            return error
        return None


def where(error: Exception | None) -> str:
    """Return the kind and the place of the error; empty without an error."""
    if error is None:
        return ""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {last.filename}:{last.lineno}"


def _dump_records(case: list[fleet_pb2.TraceRecord]) -> bytes:
    return BETWEEN.join(text_format.MessageToString(record) for record in case).encode()


def _load_records(content: bytes) -> list[fleet_pb2.TraceRecord]:
    return [text_format.Parse(text, fleet_pb2.TraceRecord()) for text in content.decode().split(BETWEEN)]


def _fewer_records(case: list[fleet_pb2.TraceRecord]) -> Iterator[list[fleet_pb2.TraceRecord]]:
    """Yield the case without half of the records, without one record, and without a field of one."""
    half = len(case) // 2
    if half:
        yield from (case[:half], case[half:])
    for at in range(len(case)):
        yield case[:at] + case[at + 1 :]
    for at, record in enumerate(case):
        for fewer in _fewer_fields(record):
            yield [*case[:at], fewer, *case[at + 1 :]]


def _fewer_fields(record: fleet_pb2.TraceRecord) -> Iterator[fleet_pb2.TraceRecord]:
    """Yield the record without a field of its message, or with fewer entries in a list of the message."""
    kind = record.WhichOneof("message")
    name = getattr(record, kind).WhichOneof("message") if kind in ("up", "down") else None
    if not (kind and name):
        return
    for field, value in getattr(getattr(record, kind), name).ListFields():
        size = len(value) // 2 if field.is_repeated else 0
        for cut in (slice(None), *([slice(size, None), slice(size)] if size else [])):
            fewer = fleet_pb2.TraceRecord()
            fewer.CopyFrom(record)
            message = getattr(getattr(fewer, kind), name)
            if cut == slice(None) or field.message_type is None or not field.message_type.GetOptions().map_entry:
                if cut == slice(None):
                    message.ClearField(field.name)
                else:
                    del getattr(message, field.name)[cut]
                yield fewer


def _fewer_bytes(case: bytes) -> Iterator[bytes]:
    size = len(case) // 2
    while size:
        yield from (case[:at] + case[at + size :] for at in range(0, len(case), size))
        size //= 2


def _same(case: bytes) -> bytes:
    return case


def _of_bytes(name: str, make: Callable[[random.Random], bytes], run: Callable[[bytes], None]) -> Target:
    return Target(name, make, run, _same, _same, _fewer_bytes)


TARGETS = {
    target.name: target
    for target in (
        Target("control", control.make, control.run, _dump_records, _load_records, _fewer_records),
        Target("agent", agent.make, agent.run, _dump_records, _load_records, _fewer_records),
        _of_bytes("toml", parsers.make_toml, parsers.run_toml),
        _of_bytes("message", parsers.make_message, parsers.run_message),
        _of_bytes("words", parsers.make_words, parsers.run_words),
        _of_bytes("trace", parsers.make_trace, parsers.run_trace),
        _of_bytes("contexts", parsers.make_contexts, parsers.run_contexts),
    )
}
