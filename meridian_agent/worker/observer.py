"""Measures the sampled rows of logits that the engine core asks for, before any mask changes them, and sends the
columns to the engine core on the model runner's own output. Runs on the worker's threads; knows nothing of policy.

On a GPU a measurement begins before sampling and its result is read together with the step's output. Under asynchronous
scheduling, vLLM's default on GPUs, the thread that waits for the sampled tokens reads the result while the next step
runs.
"""

from __future__ import annotations

import functools
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
from meridian_kernels import EntropyProbe

from meridian_agent.core.guard import Guard
from meridian_agent.core.step_signals import (
    BACKEND,
    OF_THE_START,
    PROBE_ROWS,
    PROBED,
    REQUEST,
    RESULT,
    SPENT,
    SPENT_STEPS,
    WorkerRequestDecoder,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence, Set

    from meridian_kernels import Pending
    from meridian_kernels.one_pass import Repeated
    from numpy.typing import NDArray

    from meridian_agent.core.step_signals import SignalBytes, Weights
    from meridian_agent.worker.probe_rows import ProbeRows, ProbeRowsV2


# Indices of the columns of StepSignals, in their order, among the columns that a probe measures; and the place of the
# end marker's rank among them.
SENT, RANK = (0, 5, 3, 2), 1
# Indices, among the columns that a probe measures, of the entropy and of the likeliest token: the columns of PROBED.
EAT, ANSWER = 0, 4
# The bytes of a float that is NaN.
NAN = np.float32(np.nan).tobytes()


class Measurement:
    """The measurement of one step's rows, which may still be running on the GPU. probes: number of probes that are the
    last of the measured rows."""

    def __init__(
        self, pending: Pending, first_row: NDArray[np.int32] | None, rows: ChosenRows | None, probes: int = 0
    ) -> None:
        self._pending, self._first_row, self._rows, self._probes = pending, first_row, rows, probes

    def encoded(self) -> tuple[SignalBytes, list[tuple[float, int]]]:
        """Wait for the measurement. Return the bytes of its StepSignals, and the EAT in nats and the likeliest token of
        each probe. The method makes few calls of NumPy, each of which is slow between two steps of a large model."""
        measured, probed = self._pending.columns(), list[tuple[float, int]]()
        if self._probes:
            probes = measured[:, -self._probes :]
            probed = list(zip(probes[EAT].tolist(), probes[ANSWER].view(np.int32).tolist(), strict=True))
            measured = measured[:, : -self._probes]
        columns = measured.take(SENT, axis=0)
        if (rows := self._rows) is not None:
            chosen, columns = columns, rows.blank.copy()
            columns[:, rows.chosen] = chosen
        encoded = columns.tobytes()
        if rows is not None and rows.at_ends:
            encoded = without_entropy(encoded)
        return encoded if self._first_row is None else (encoded, self._first_row.tobytes()), probed


class FinishedMeasurement:
    """The measurement of one step's rows that is over. signals: the bytes of its StepSignals. probed: the bytes of the
    columns of PROBED for the step's probes."""

    def __init__(self, signals: bytes, probed: bytes) -> None:
        self._signals, self._probed = signals, probed

    def encoded(self) -> tuple[SignalBytes, list[tuple[float, int]]]:
        if not self._probed:
            return self._signals, []
        # Both columns have four bytes for each probe.
        count = len(self._probed) // 8
        values = struct.unpack(f"={count}f{count}i", self._probed)
        return self._signals, list(zip(values[:count], values[count:], strict=True))


class ChosenRows:
    """The rows of a step that are measured.

    chosen: indices of the measured rows, ascending. at_ends: whether these are rows of `rows_after_ends`.
    """

    def __init__(self, count: int, chosen: NDArray[np.int32], *, at_ends: bool = False) -> None:
        self.chosen, self.at_ends, self._count = chosen, at_ends, count

    @functools.cached_property
    def blank(self) -> NDArray[np.float32]:
        """The columns of StepSignals for all rows of the step, of which none is measured."""
        blank = np.full((len(SENT), self._count), np.nan, np.float32)
        blank[RANK] = 0.0
        return blank


def rows_wanted(
    req_ids: Sequence[str], excluded_ids: Set[str], first_row: NDArray[np.int32] | None, count: int
) -> ChosenRows | None:
    """Return the rows of all requests but `excluded_ids`, out of the step's `count` rows; None if no request of the
    step is excluded.

    first_row: index of each request's first row; None if each request has one row.
    """
    if excluded_ids.isdisjoint(req_ids):
        return None
    wanted = np.fromiter((r not in excluded_ids for r in req_ids), bool, len(req_ids))
    if first_row is not None:
        wanted = np.repeat(wanted, np.diff(first_row, append=count))
    return ChosenRows(count, np.flatnonzero(wanted).astype(np.int32))


def rows_after_ends(batch: Any, flags: NDArray[np.uint8], rows: ChosenRows | None, count: int) -> ChosenRows:
    """Return those of the rows, or of all the step's `count` rows, whose newest token may end a sentence: it may by
    itself, or it may belong to the end that the token before it has begun.

    batch: that of Model Runner V1, without draft tokens. flags: as `WorkerRequestDecoder.flags` returns them.
    """
    among = np.arange(count, dtype=np.int32) if rows is None else rows.chosen
    last = batch.num_tokens_no_spec[among] - 1
    kind = flags.take(batch.token_ids_cpu[among, last], mode="clip")
    among, last, kind = among[chosen := kind != 0], last[chosen], kind[chosen]
    before = flags.take(batch.token_ids_cpu[among, np.maximum(last - 1, 0)], mode="clip")
    return ChosenRows(count, among[(kind == 1) | (before != 0)], at_ends=True)


def without_entropy(signals: bytes) -> bytes:
    """Return the bytes of StepSignals with NaN as the entropy of each row.

    RPDI is a mean over all tokens, and a mean over the tokens that follow a sentence end would pass for it.
    """
    size = len(signals) // len(SENT)
    return NAN * (size // len(NAN)) + signals[size:]


def first_rows(req_ids: Sequence[str], drafts: Mapping[str, Sequence[int]]) -> NDArray[np.int32] | None:
    """Return the index of each request's first row; None if no request has drafts. A request has one row for its next
    token and one for each draft token."""
    if not drafts:
        return None
    more = [len(drafts.get(r, ())) for r in req_ids]
    rows = np.arange(len(req_ids), dtype=np.int32)
    rows[1:] += np.cumsum(more, dtype=np.int32)[:-1]
    return rows


class Wanted:
    """Remembers the rows that the previous step measured, because most steps measure the same rows."""

    def __init__(self) -> None:
        self._req_ids: list[str] = []
        self._excluded_ids: Set[str] = frozenset()
        self._rows: ChosenRows | None = None

    def rows(
        self, req_ids: Sequence[str], excluded_ids: Set[str], first_row: NDArray[np.int32] | None, count: int
    ) -> ChosenRows | None:
        """Return the same as `rows_wanted`. excluded_ids: must be a different object whenever its ids have changed."""
        if first_row is not None:
            return rows_wanted(req_ids, excluded_ids, first_row, count)
        if excluded_ids is not self._excluded_ids or req_ids != self._req_ids:
            self._rows = rows_wanted(req_ids, excluded_ids, None, count)
            self._req_ids, self._excluded_ids = list(req_ids), excluded_ids
        return self._rows


class Observer:
    """Measures the logits of one model runner."""

    def __init__(self, runner: Any) -> None:
        self.probe = EntropyProbe()
        # `guard` runs the measuring and `delivery` runs the sending to the engine core. When measuring has failed, the
        # sending still works and reports the fault.
        self.guard, self.delivery = Guard("no entropy from this worker"), Guard("no entropy from this worker")
        # The newest fault that has not been sent to the engine core yet, even if the worker has recovered from it.
        self._untold = ""
        for guard in (self.guard, self.delivery):
            guard.on_trip = functools.partial(self._tell, guard)
        self._runner = runner
        self._recovered = False
        # Whether the newest step has nothing to measure and nothing to tell; False during a fault, which is told.
        self.is_idle = False
        self._asked, self._which = WorkerRequestDecoder(), Wanted()
        # The end marker's first token id; the ids of the requests whose rows are not measured; and
        # SentenceTable.may_end if only rows are measured whose newest token may end a sentence, else None.
        self._wanted: tuple[int, Set[str], NDArray[np.uint8] | None] | None = None
        # Whether the runner's batch has the newest token of each row before sampling.
        self.knows_newest = False
        self._measurement: Measurement | FinishedMeasurement | None = None
        # The object that measures most steps, and the token of the end marker for which it was made. The object is None
        # if only `EntropyProbe.begin` can measure this worker's logits.
        self._repeated: Repeated | None = None
        self._repeated_for: int | None = None
        # The object that measures the rows of probes behind rows that `_repeated` measures.
        self._repeated_probes: Repeated | None = None
        # The probes that steps compute as rows of their requests; None if this runner cannot.
        self.probe_rows: ProbeRows | ProbeRowsV2 | None = None
        # With Model Runner V2: the batch for which the runner computes logits next.
        self._awaited: Any = None
        # Whether the next signals carry the backend's name and `_weights`. A new agent does not know them, and it first
        # sends its list of excluded ids, so each such list sets this flag.
        self._tells_backend = False
        self._weights: Weights = OF_THE_START
        # Number of outputs so far.
        self._outputs = 0

    def begins_idle(self, scheduler_output: Any) -> bool:
        """Return whether there is nothing to measure in the step that begins, and nothing to tell or to release after
        it."""
        if getattr(scheduler_output, REQUEST, None) or getattr(scheduler_output, PROBE_ROWS, None):
            return False
        releases = self.probe_rows is not None and self.probe_rows.logits is not None
        return not (releases or self._recovered or self.delivery.fault)

    def come_back(self) -> None:
        """Start measuring again if the rest after a fault is over. Called only before a step, because a step resets all
        state of the measurement."""
        measures, tells = self.guard.come_back(), self.delivery.come_back()
        self._recovered = measures and tells

    def _tell(self, guard: Guard) -> None:
        self._untold = guard.fault

    def replaced_weights(self, model: str | None) -> None:
        """Note that the model's weights are replaced, and tell the engine core with the next signals. model: as in
        `Weights`."""
        self._weights = self._weights[0] + 1, model
        self._tells_backend = True

    def begin(self, scheduler_output: Any) -> None:
        """Remember which rows the engine core asks for in this step."""
        request = getattr(scheduler_output, REQUEST, None)
        if request is None:
            self._wanted = None
            return
        flags = self._asked.flags(request)
        self._wanted = request[0], self._asked.excluded_ids(request), flags if self.knows_newest else None
        self._tells_backend |= request[2] is not None

    def before_sampling(self) -> None:
        """Begin to measure if the step's logits exist already. Model Runner V1 keeps the raw logits between its forward
        pass and sampling; V2 computes them inside `sample_tokens`, so `on_logits` measures them."""
        self._measurement = self._awaited = None
        state = self._runner.execute_model_state
        if self._wanted is None or state is None:
            return
        if not hasattr(state, "logits"):
            self._awaited = state.input_batch
        elif state.logits is not None:
            req_ids = self._runner.input_batch.req_ids
            # If draft tokens are made on the GPU, only the runner's own scheduler output knows how many there were.
            drafts = state.scheduler_output.scheduled_spec_decode_tokens
            self._measure(state.logits, req_ids, first_rows(req_ids, drafts))

    def on_logits(self, logits: Any) -> None:
        """Begin to measure the logits of Model Runner V2. The first logits computed inside `sample_tokens` are the ones
        that the runner samples from, before any mask."""
        if self._awaited is not None:
            batch, self._awaited = self._awaited, None
            # If there are as many rows as requests, no request has draft tokens, so no first rows are needed.
            drafts = len(logits) != len(batch.req_ids)
            self._measure(logits, batch.req_ids, batch.cu_num_logits_np[:-1] if drafts else None)

    def _measure(self, logits: Any, req_ids: Sequence[str], first_row: NDArray[np.int32] | None) -> None:
        """Begin to measure the rows of the requests, and those of the step's probes."""
        assert self._wanted is not None
        end, excluded_ids, flags = self._wanted
        # The rows of the requests, followed by those of the probes; None without probes.
        probed = None if self.probe_rows is None else self.probe_rows.logits
        rows = self._which.rows(req_ids, excluded_ids, first_row, len(logits)) if excluded_ids else None
        if flags is not None:
            rows = rows_after_ends(self._runner.input_batch, flags, rows, len(logits))
        chosen = None if rows is None else rows.chosen
        if first_row is None and (finished := self._again(logits, end, chosen, probed)) is not None:
            signals, eat = finished
            self._measurement = FinishedMeasurement(signals if flags is None else without_entropy(signals), eat)
            return
        if probed is None:
            self._measurement = Measurement(self.probe.begin(logits, end, chosen), first_row, rows)
            return
        own = len(logits)
        if chosen is not None:
            chosen = np.concatenate((chosen, np.arange(own, len(probed), dtype=np.int32)))
        self._measurement = Measurement(self.probe.begin(probed, end, chosen), first_row, rows, len(probed) - own)

    def _again(self, logits: Any, end: int, rows: NDArray[np.int32] | None, probed: Any) -> tuple[bytes, bytes] | None:
        """Return the bytes of the StepSignals of these logits, and those of the columns EAT and ANSWER of the probes'
        rows, if compiled code can measure them; None otherwise. probed: the logits followed by the probes' rows; None
        without probes."""
        if end != self._repeated_for:
            self._repeated, self._repeated_for = self.probe.repeated(logits, end, SENT), end
        signals = None if self._repeated is None else self._repeated.measure(logits, rows)
        if signals is None:
            return None
        if probed is None:
            return signals, b""
        rest = probed[len(logits) :]
        if self._repeated_probes is None:
            self._repeated_probes = self.probe.repeated(rest, end, (EAT, ANSWER))
        eat = None if self._repeated_probes is None else self._repeated_probes.measure(rest)
        return None if eat is None else (signals, eat)

    def take(self) -> Measurement | FinishedMeasurement | None:
        """Return the step's measurement and forget it; None if nothing was measured."""
        measurement, self._measurement = self._measurement, None
        return measurement

    def put(self, output: Any, measurement: Measurement | FinishedMeasurement | None) -> None:
        """Put the step's signals on the output that goes to the engine core, or the fault that prevented them."""
        # vLLM may use one shared object for all outputs without requests, so nothing is set on such an output.
        if not getattr(output, "req_ids", None):
            return
        self._outputs += 1
        if self._outputs % SPENT_STEPS == 0:
            setattr(output, SPENT, self.guard.seconds + self.delivery.seconds)
        signals, probed = self._encoded(measurement)
        if probed:
            setattr(output, PROBED, probed)
        said = self._untold or (signals if signals is not None else self.guard.fault)
        if said or self._recovered:
            setattr(output, RESULT, said)
            # Only an empty text says that the worker measures again.
            self._recovered = self._recovered and said != ""
        if self._tells_backend and signals is not None:
            self._tells_backend = False
            has_rows = self.probe_rows is not None
            setattr(output, BACKEND, (self.probe.backend, self.probe.fallback, has_rows, self._weights))
        self._untold = ""

    def _encoded(
        self, measurement: Measurement | FinishedMeasurement | None
    ) -> tuple[SignalBytes | None, list[tuple[float, int]]]:
        """Return what a measurement has found; (None, []) if there is none or it fails. `delivery` counts the time."""
        if measurement is not None and not self.guard.fault:
            try:
                return measurement.encoded()
            except Exception as error:
                self.guard.trip(measurement.encoded, error)
        return None, []
