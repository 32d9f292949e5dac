"""Carries a step's signals between the engine core and its workers, on vLLM's own messages.

Where workers have processes of their own it crosses one in every step, so it is of plain types: a class or an array is
looked up and put together anew on the other side, which takes longer than all else that is done with a step's signals.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Set

    from numpy.typing import NDArray

# Attribute of SchedulerOutput (engine core to worker): a WorkerRequest, absent when not observing.
REQUEST = "meridian_wanted"
# Attribute of ModelRunnerOutput (worker to engine core): SignalBytes, or why this worker measures nothing; empty
# where it measures again.
RESULT = "meridian_signals"
# Attribute of ModelRunnerOutput (worker to engine core), on the first output after names were sent: what measures there
# (cpu, cuda or torch), and why it is not the CUDA kernel, empty where it is or none is needed.
BACKEND = "meridian_backend"

# The id of the end marker's first token, the version of the list of request ids to leave out, and that list; None where
# the list of this version was sent before.
WorkerRequest = tuple[int, int, tuple[str, ...] | None]
# The three columns of StepSignals, one after the other; with drafts, a pair of these bytes and those of `first_row`.
SignalBytes = bytes | tuple[bytes, bytes]


class WorkerRequestEncoder:
    """The engine core's side: it sends the list of request ids to leave out only when the list has changed."""

    def __init__(self) -> None:
        self._sent: Set[str] | None = None
        self._request: WorkerRequest = (-1, 0, None)

    def request(self, end_token_id: int, excluded_ids: Set[str]) -> WorkerRequest:
        """The request for a step. excluded_ids: another object whenever the ids have changed."""
        known_end, version, _ = self._request
        if excluded_ids is not self._sent:
            self._sent, self._request = excluded_ids, (end_token_id, version + 1, None)
            return end_token_id, version + 1, tuple(excluded_ids)
        if end_token_id != known_end:
            self._request = end_token_id, version, None
        return self._request


class WorkerRequestDecoder:
    """The worker's side: it keeps the newest list of request ids to leave out."""

    def __init__(self) -> None:
        self._version, self._excluded_ids = 0, frozenset[str]()

    def excluded_ids(self, request: WorkerRequest) -> Set[str]:
        """Request ids to leave out; empty if the list of this version never arrived."""
        _, version, excluded_ids = request
        if excluded_ids is not None:
            self._version, self._excluded_ids = version, frozenset(excluded_ids)
        return self._excluded_ids if version == self._version else frozenset()


@dataclass(slots=True)
class StepSignals:
    """Signals of one step, rows in the order of the runner's `req_ids`; NaN, and rank 0, where nothing was measured.

    first_row: [requests] first row of each request, which has 1 + drafts rows; None when each has one.
    """

    first_row: NDArray[np.int32] | None
    entropy_nats: NDArray[np.float32]
    end_rank: NDArray[np.int32]
    end_logprob_nats: NDArray[np.float32]

    def row(self, request: int) -> int:
        """First row of the request at this place in `req_ids`."""
        return request if self.first_row is None else int(self.first_row[request])

    def encode(self) -> SignalBytes:
        """The columns as plain bytes, for another process."""
        columns = b"".join((self.entropy_nats.tobytes(), self.end_rank.tobytes(), self.end_logprob_nats.tobytes()))
        return columns if self.first_row is None else (columns, self.first_row.tobytes())

    @classmethod
    def decode(cls, encoded: SignalBytes) -> StepSignals:
        """The inverse of `encode`."""
        columns, first_row = encoded if isinstance(encoded, tuple) else (encoded, None)
        entropy, end_rank, end_logprob = np.frombuffer(columns, np.float32).reshape(3, -1)
        first = None if first_row is None else np.frombuffer(first_row, np.int32)
        return cls(first, entropy, end_rank.view(np.int32), end_logprob)
