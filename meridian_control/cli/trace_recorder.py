"""Writes the stream of FleetService.RecordTrace to a trace file.

The module owns the end of a recording, and the retries after the stream breaks off. The module uses one thread
and blocking calls.
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

from meridian_control.cli.console import RECONNECT_S, RETRY_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from meridian.v1 import fleet_pb2_grpc

    from meridian_control.offline.trace_file import TraceWriter


@dataclass(frozen=True)
class RecordingLimits:
    """Limits after which a recording ends: its duration in seconds, and the number of requests recorded from their
    opening to their end; 0 means no limit."""

    duration_s: float = 0.0
    requests: int = 0


@dataclass
class Recorder:
    """Records one trace. `breaks` is the number of times the stream broke off; requests live at such a time are not in
    the trace."""

    fleet: fleet_pb2_grpc.FleetServiceStub
    out: TraceWriter
    limits: RecordingLimits
    progress: Callable[[TraceWriter], None]
    breaks: int = 0
    # Replicas that did not answer at least once during the recording.
    unreachable: set[str] = field(default_factory=set)
    _writing: bool = False
    _stopped: bool = False

    def run(self, engine_id: str) -> None:
        """Record until a limit is reached or a signal arrives. Raises grpc.RpcError, and FileError if the disk is full.

        After an error the file still holds a complete trace of the records written before, of a full disk without the
        newest ones.
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
        """Let SIGINT and SIGTERM end the recording, but never in the middle of writing a record."""
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
