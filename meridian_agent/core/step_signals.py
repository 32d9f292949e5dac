"""What the engine core and its workers tell each other of a step's signals, on vLLM's own messages.

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

# Attribute of SchedulerOutput (engine core to worker): a Request, absent when not observing.
REQUEST = "meridian_wanted"
# Attribute of ModelRunnerOutput (worker to engine core): what was Told, or why this worker measures nothing, empty
# where it can again.
RESULT = "meridian_signals"
# Attribute of ModelRunnerOutput (worker to engine core), on the first output after names were sent: what measures there
# (cpu, cuda or torch), and why it is not the CUDA kernel, empty where it is or none is needed.
BACKEND = "meridian_backend"

# The id of the end marker's first token, a mark, and the requests whose rows are not wanted; None for those that came
# with that mark before.
Request = tuple[int, int, tuple[str, ...] | None]
# The three columns of StepSignals, one after the other; with drafts a pair of them and `first_row`.
Told = bytes | tuple[bytes, bytes]


class Asking:
    """The engine core's side of requests: names go out when they have changed."""

    def __init__(self) -> None:
        self._named: Set[str] | None = None
        self._request: Request = (-1, 0, None)

    def request(self, end_token_id: int, not_of: Set[str]) -> Request:
        """What to ask for. not_of: another object whenever it has changed."""
        known_end, mark, _ = self._request
        if not_of is not self._named:
            self._named, self._request = not_of, (end_token_id, mark + 1, None)
            return end_token_id, mark + 1, tuple(not_of)
        if end_token_id != known_end:
            self._request = end_token_id, mark, None
        return self._request


class Asked:
    """The worker's side: what was named under the newest mark."""

    def __init__(self) -> None:
        self._mark, self._not_of = 0, frozenset[str]()

    def not_of(self, request: Request) -> Set[str]:
        """The requests whose rows are not wanted; of a mark that has not come, none."""
        _, mark, names = request
        if names is not None:
            self._mark, self._not_of = mark, frozenset(names)
        return self._not_of if mark == self._mark else frozenset()


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

    def told(self) -> Told:
        columns = b"".join((self.entropy_nats.tobytes(), self.end_rank.tobytes(), self.end_logprob_nats.tobytes()))
        return columns if self.first_row is None else (columns, self.first_row.tobytes())

    @classmethod
    def of(cls, told: Told) -> StepSignals:
        """What was told, as it was."""
        columns, first_row = told if isinstance(told, tuple) else (told, None)
        entropy, end_rank, end_logprob = np.frombuffer(columns, np.float32).reshape(3, -1)
        first = None if first_row is None else np.frombuffer(first_row, np.int32)
        return cls(first, entropy, end_rank.view(np.int32), end_logprob)
