"""The client's side of a recording: FleetService.RecordTrace into a trace file.

Owns when a recording ends, and what becomes of it when the stream breaks. One thread, blocking calls.
"""

from __future__ import annotations

import signal
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
from meridian.v1 import fleet_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from meridian.v1 import fleet_pb2_grpc

    from meridian_control.offline.trace_file import TraceWriter

# A stream that broke off is tried again for this long: servers close streams now and then, and restart.
RECONNECT_S = 30.0
RETRY_S = 0.5


@dataclass(frozen=True)
class RecordingLimits:
    """When a recording ends by itself: after so many seconds, or so many requests that it holds whole; 0 for never."""

    duration_s: float = 0.0
    requests: int = 0


@dataclass
class Recorder:
    """One recording. `breaks` counts how often the stream broke off; requests that lived then are not in the trace."""

    fleet: fleet_pb2_grpc.FleetServiceStub
    out: TraceWriter
    limits: RecordingLimits
    progress: Callable[[TraceWriter], None]
    breaks: int = 0
    # Replicas that were not heard, at least for a while.
    unreachable: set[str] = field(default_factory=set)
    _writing: bool = False
    _stopped: bool = False

    def run(self, engine_id: str) -> None:
        """Record until a limit or a signal. Raises grpc.RpcError, and FileError when the disk is full.

        What was written until then is a whole trace all the same.
        """
        deadline = time.monotonic() + self.limits.duration_s if self.limits.duration_s else None
        with self._signals(), suppress(KeyboardInterrupt):
            self._run(engine_id, deadline)

    def _run(self, engine_id: str, deadline: float | None) -> None:
        retry_until = 0.0
        while not self._done(deadline):
            before = self.out.records
            try:
                self._stream(engine_id, deadline)
            except grpc.RpcError as error:
                if deadline is not None and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    return
                worked = self.out.records > before or time.monotonic() < retry_until
                if error.code() is not grpc.StatusCode.UNAVAILABLE or not worked:
                    raise
            if self._done(deadline):
                return
            if self.out.records > before:
                self.breaks += 1
                retry_until = time.monotonic() + RECONNECT_S
            time.sleep(RETRY_S)

    def _done(self, deadline: float | None) -> bool:
        late = deadline is not None and time.monotonic() >= deadline
        return late or self._stopped or 0 < self.limits.requests <= self.out.requests

    def _stream(self, engine_id: str, deadline: float | None) -> None:
        timeout = max(0.0, deadline - time.monotonic()) if deadline is not None else None
        call = self.fleet.RecordTrace(fleet_pb2.RecordTraceRequest(engine_id=engine_id), timeout=timeout)
        try:
            for response in call:
                self._writing = True
                self.out.write(response.record)
                self._writing = False
                self.unreachable.update(response.unreachable_replicas)
                if self._done(deadline):
                    return
                self.progress(self.out)
        finally:
            call.cancel()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM end the recording, never in the middle of a record."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = [signal.signal(number, self._on_signal) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)

    def _on_signal(self, *_: Any) -> None:
        self._stopped = True
        if not self._writing:
            raise KeyboardInterrupt
