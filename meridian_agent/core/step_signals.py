"""Carries a step's signals between the engine core and its workers, on vLLM's own messages.

If workers have processes of their own, the signals cross a process boundary in every step, so they have plain types. To
unpickle a class or an array would take longer than everything else that the agent does with a step's signals.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence, Set, Sized

    from numpy.typing import NDArray

# Name of an attribute of SchedulerOutput (engine core to worker) with a WorkerRequest; absent if nothing is to be
# measured.
REQUEST = "meridian_wanted"
# Name of an attribute of ModelRunnerOutput (worker to engine core) with SignalBytes, or with the reason why the worker
# measures nothing, which is empty once it measures again.
RESULT = "meridian_signals"
# Name of an attribute of ModelRunnerOutput (worker to engine core) with the worker's backend (cpu, cuda or torch) and
# the reason if a faster way to measure failed, whether the worker can compute a probe as a row of the probed request,
# and the `Weights` of its model. Only the first measured output after a new list of request ids, or after a replacement
# of the weights, has this attribute.
BACKEND = "meridian_backend"
# Name of an attribute of SchedulerOutput (engine core to worker) with the tokens of each probe that the step computes
# as a row of the probed request, by request id; and of an attribute of ModelRunnerOutput (worker to engine core) with a
# pair for each of these probes, in the same order: its EAT in nats, and its likeliest token.
PROBE_ROWS = "meridian_probe_rows"
PROBED = "meridian_probed"
# Name of an attribute of ModelRunnerOutput (worker to engine core) with the seconds that the agent has spent in the
# worker since its start. One output in SPENT_STEPS has this attribute.
SPENT = "meridian_spent"
SPENT_STEPS = 16

# The id of the end marker's first token; the version of the list of request ids to leave out; the list itself, or None
# if the list of this version was sent before; and SentenceTable.may_end if only tokens that follow a sentence end are
# to be measured, empty if it was sent before, or None if all tokens are to be measured.
WorkerRequest = tuple[int, int, tuple[str, ...] | None, bytes | None]
# The bytes of the four columns of StepSignals, one after the other; with draft tokens, a pair of these bytes and the
# bytes of `first_row`.
SignalBytes = bytes | tuple[bytes, bytes]
# How often the model's weights may have been replaced since the engine's start; and the model, as vLLM names it, from
# whose files all of them were loaded last, None if they came from elsewhere or have not been replaced.
Weights = tuple[int, str | None]
OF_THE_START: Weights = (0, None)


class WorkerRequestEncoder:
    """Encodes requests in the engine core: sends the list of request ids to leave out only if the list that was sent
    before would not do for the step, and SentenceTable.may_end once."""

    def __init__(self) -> None:
        self._sent: Set[str] | None = None  # The list that was sent last.
        # SentenceTable.may_end if only tokens that follow a sentence end are read; empty if all are. It is always the
        # same.
        self.flags = b""
        self._sent_flags = False
        self._request: WorkerRequest = (-1, 0, None, None)

    def request(
        self, end_token_id: int, request_ids: Set[str], unmeasured_ids: Set[str], probes: Sized = ()
    ) -> WorkerRequest | None:
        """Return the request for a step of these requests; None if each of them is in `unmeasured_ids`, which may have
        many more. probes: probes that are requests of their own, because of which all tokens are read."""
        excluded_ids, sent_ids = request_ids & unmeasured_ids, self._sent
        if len(excluded_ids) == len(request_ids):
            return None
        known_end, version, _, known_flags = self._request
        flags = b"" if self.flags and not probes else None
        changed = sent_ids is None or (excluded_ids != sent_ids and excluded_ids != request_ids & sent_ids)
        if changed or (flags is not None and not self._sent_flags):
            sent = flags if flags is None or self._sent_flags else self.flags
            # In a pipeline the batches have different requests and take turns, so those of the last batches stay.
            self._sent = excluded_ids | (sent_ids & unmeasured_ids) if sent_ids else excluded_ids
            self._sent_flags = self._sent_flags or flags is not None
            self._request = end_token_id, version + 1, None, flags
            return end_token_id, version + 1, tuple(self._sent), sent
        if end_token_id != known_end or flags != known_flags:
            self._request = end_token_id, version, None, flags
        return self._request


class WorkerRequestDecoder:
    """Decodes requests in the worker: keeps the newest list of request ids to leave out, and SentenceTable.may_end."""

    def __init__(self) -> None:
        self._version, self._excluded_ids = 0, frozenset[str]()
        self._flags: NDArray[np.uint8] | None = None

    def excluded_ids(self, request: WorkerRequest) -> Set[str]:
        """Return the request ids to leave out; empty if the list of this version never arrived."""
        _, version, excluded_ids, _ = request
        if excluded_ids is not None:
            self._version, self._excluded_ids = version, frozenset(excluded_ids)
        return self._excluded_ids if version == self._version else frozenset()

    def flags(self, request: WorkerRequest) -> NDArray[np.uint8] | None:
        """Return SentenceTable.may_end, with a last entry of 0 for all larger ids; None if all tokens are wanted, or if
        it never arrived."""
        if flags := request[3]:
            self._flags = np.frombuffer(flags + b"\0", np.uint8)
        return None if flags is None else self._flags


@dataclass(slots=True)
class StepSignals:
    """Signals of one step, with rows in the order of the runner's `req_ids`; rows that were not measured have NaN and
    rank 0.

    first_row: [requests] first row of each request, which has one row and another for each draft token; None if each
    request has one row.
    """

    first_row: NDArray[np.int32] | None
    entropy_nats: NDArray[np.float32]
    end_rank: NDArray[np.int32]
    end_logprob_nats: NDArray[np.float32]
    top_logprob_nats: NDArray[np.float32]

    def row(self, request: int) -> int:
        """Return the first row of the request at this place in `req_ids`."""
        return request if self.first_row is None else int(self.first_row[request])

    def encode(self) -> SignalBytes:
        """Return the columns as plain bytes, for another process."""
        columns = self.entropy_nats, self.end_rank, self.end_logprob_nats, self.top_logprob_nats
        encoded = b"".join(column.tobytes() for column in columns)
        return encoded if self.first_row is None else (encoded, self.first_row.tobytes())

    @classmethod
    def decode(cls, encoded: SignalBytes) -> StepSignals:
        """Return the signals that `encode` turned into these bytes."""
        entropy, end_rank, end_logprob, top_logprob = signal_bits([encoded])[0].view(np.float32)
        first = np.frombuffer(encoded[1], np.int32) if isinstance(encoded, tuple) else None
        return cls(first, entropy, end_rank.view(np.int32), end_logprob, top_logprob)


def signal_bits(steps: Sequence[SignalBytes]) -> NDArray[np.uint32]:
    """Return the bits of the four columns of StepSignals, in their order, [steps, 4, rows]. steps: encoded signals of
    the same number of rows."""
    columns = [encoded[0] if isinstance(encoded, tuple) else encoded for encoded in steps]
    return np.frombuffer(b"".join(columns), np.uint32).reshape(len(columns), 4, -1)


def first_rows(encoded: tuple[bytes, bytes]) -> list[int]:
    """Return the first row of each request in these signals, which have a row for each draft token, too."""
    first: list[int] = np.frombuffer(encoded[1], np.int32).tolist()
    return first


def expected_backend(device_type: str) -> tuple[str, str]:
    """Return the backend (cpu, cuda, torch or none) that is expected on this kind of device, without touching the
    device, and the reason if it is torch or none."""
    if device_type == "cpu":
        return "cpu", ""
    if device_type != "cuda":
        return "none", f"there are no entropy kernels for {device_type}"
    if importlib.util.find_spec("cupy") is None:
        return "torch", "CuPy is not installed (extras cuda12, cuda13)"
    return "cuda", ""
