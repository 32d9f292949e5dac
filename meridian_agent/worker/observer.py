"""The worker role: measures the sampled logits rows that are asked for, before any mask changes them, and hands the
columns to the engine core on the model runner's own output. Runs on the worker's threads; knows nothing of requests'
meaning or of policy.

On a GPU a measurement is begun here and read when the output is: under asynchronous scheduling, vLLM's default there,
on the thread that waits for the sampled tokens, while the next step is under way.
"""

from __future__ import annotations

import functools
import logging
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from meridian_kernels import EntropyProbe, KernelError

from meridian_agent.core.entropy_backend import expected_backend
from meridian_agent.core.guard import Guard
from meridian_agent.core.step_signals import BACKEND, REQUEST, RESULT, StepSignals, WorkerRequestDecoder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence, Set

    from meridian_kernels import Pending
    from numpy.typing import NDArray

logger = logging.getLogger("vllm.meridian")


class Measurement:
    """A step's rows, being measured."""

    def __init__(self, pending: Pending, first_row: NDArray[np.int32] | None, rows: ChosenRows | None) -> None:
        self._pending, self._first_row, self._rows = pending, first_row, rows

    def signals(self) -> StepSignals:
        s, rows = self._pending.result(), self._rows
        if rows is None:
            return StepSignals(self._first_row, s.entropy_nats, s.end_rank, s.end_logprob_nats)
        entropy, end_logprob = np.full((2, rows.count), np.nan, np.float32)
        end_rank = np.zeros(rows.count, np.int32)
        entropy[rows.chosen], end_rank[rows.chosen] = s.entropy_nats, s.end_rank
        end_logprob[rows.chosen] = s.end_logprob_nats
        return StepSignals(self._first_row, entropy, end_rank, end_logprob)


@dataclass(frozen=True, slots=True)
class ChosenRows:
    """Some of a step's `count` rows. chosen: their numbers, ascending."""

    count: int
    chosen: NDArray[np.int32]


def rows_wanted(
    req_ids: Sequence[str], excluded_ids: Set[str], first_row: NDArray[np.int32] | None, count: int
) -> ChosenRows | None:
    """The rows of the requests that are not named, of `count`; None for all."""
    if excluded_ids.isdisjoint(req_ids):
        return None
    wanted = np.fromiter((r not in excluded_ids for r in req_ids), bool, len(req_ids))
    if first_row is not None:
        wanted = np.repeat(wanted, np.diff(first_row, append=count))
    return ChosenRows(count, np.flatnonzero(wanted).astype(np.int32))


def first_rows(req_ids: Sequence[str], drafts: Mapping[str, Sequence[int]]) -> NDArray[np.int32] | None:
    """The first row of each request, of 1 + its drafts; None where each has one."""
    if not drafts:
        return None
    more = [len(drafts.get(r, ())) for r in req_ids]
    rows = np.arange(len(req_ids), dtype=np.int32)
    rows[1:] += np.cumsum(more, dtype=np.int32)[:-1]
    return rows


class Wanted:
    """The rows to measure, which are mostly those of the step before."""

    def __init__(self) -> None:
        self._req_ids: list[str] = []
        self._excluded_ids: Set[str] = frozenset()
        self._rows: ChosenRows | None = None

    def rows(
        self, req_ids: Sequence[str], excluded_ids: Set[str], first_row: NDArray[np.int32] | None, count: int
    ) -> ChosenRows | None:
        """As `rows_wanted`. excluded_ids: another object whenever it has changed."""
        if first_row is not None:
            return rows_wanted(req_ids, excluded_ids, first_row, count)
        if excluded_ids is not self._excluded_ids or req_ids != self._req_ids:
            self._rows = rows_wanted(req_ids, excluded_ids, None, count)
            self._req_ids, self._excluded_ids = list(req_ids), excluded_ids
        return self._rows


class Observer:
    """Measures for one model runner."""

    def __init__(self, runner: Any) -> None:
        self.probe = EntropyProbe()
        # Two guards: one for measuring, one for handing over, which goes on when measuring has failed, to say so.
        self.guard, self.delivery = Guard("no entropy from this worker"), Guard("no entropy from this worker")
        # A fault that the engine core has not been told of, whether it is over or not.
        self._untold = ""
        for guard in (self.guard, self.delivery):
            guard.on_trip = functools.partial(self._tell, guard)
        self._runner = runner
        self._recovered = False
        self._asked, self._which = WorkerRequestDecoder(), Wanted()
        # The end marker's first token, and whose rows are not wanted.
        self._wanted: tuple[int, Set[str]] | None = None
        self._measurement: Measurement | None = None
        # Model Runner V2: the batch whose logits are about to be computed.
        self._awaited: Any = None
        # An agent that begins sends names, and does not know what measures here.
        self._tells_backend = False

    def come_back(self) -> None:
        """Measure again once a fault has been rested from; only before a step, which begins everything anew."""
        measures, tells = self.guard.come_back(), self.delivery.come_back()
        self._recovered = measures and tells

    def _tell(self, guard: Guard) -> None:
        self._untold = guard.fault

    def begin(self, scheduler_output: Any) -> None:
        """Note what the engine core asks for in this step."""
        request = getattr(scheduler_output, REQUEST, None)
        self._wanted = None if request is None else (request[0], self._asked.excluded_ids(request))
        self._tells_backend |= request is not None and request[2] is not None

    def before_sampling(self) -> None:
        """V1 keeps the step's raw logits between its forward pass and sampling; V2 computes them while it samples."""
        self._measurement = self._awaited = None
        state = self._runner.execute_model_state
        if self._wanted is None or state is None:
            return
        if not hasattr(state, "logits"):
            self._awaited = state.input_batch
        elif state.logits is not None:
            req_ids = self._runner.input_batch.req_ids
            # From the runner's own scheduler output: where drafts are made on the GPU, only it knows how many there
            # were.
            drafts = state.scheduler_output.scheduled_spec_decode_tokens
            self._measure(state.logits, req_ids, first_rows(req_ids, drafts))

    def on_logits(self, logits: Any) -> None:
        """V2: the first logits computed inside `sample_tokens` are those it samples from, not masked yet."""
        if self._awaited is not None:
            batch, self._awaited = self._awaited, None
            # No more rows than requests: nobody has drafts, and the step can be accounted as a whole.
            drafts = len(logits) != len(batch.req_ids)
            self._measure(logits, batch.req_ids, batch.cu_num_logits_np[:-1] if drafts else None)

    def _measure(self, logits: Any, req_ids: Sequence[str], first_row: NDArray[np.int32] | None) -> None:
        assert self._wanted is not None
        end, excluded_ids = self._wanted
        rows = self._which.rows(req_ids, excluded_ids, first_row, len(logits)) if excluded_ids else None
        pending = self.probe.begin(logits, end, None if rows is None else rows.chosen)
        self._measurement = Measurement(pending, first_row, rows)

    def take(self) -> Measurement | None:
        """The step's measurement, once."""
        measurement, self._measurement = self._measurement, None
        return measurement

    def put(self, output: Any, measurement: Measurement | None) -> None:
        """Put the step's signals, or the fault that keeps them away, on the output that goes to the engine core."""
        # Outputs without requests may be one object that vLLM shares.
        if not getattr(output, "req_ids", None):
            return
        signals = None if measurement is None else self.guard.run(measurement.signals)
        said = self._untold or (signals.encode() if signals is not None else self.guard.fault)
        if said or self._recovered:
            setattr(output, RESULT, said)
        if self._tells_backend and signals is not None:
            setattr(output, BACKEND, (self.probe.backend, self.probe.fallback))
            self._tells_backend = False
        self._untold = ""


def strewn(worker: Any) -> str:
    """The feature of vLLM that leaves a worker unable to tell whose the rows of its logits are; empty when nothing.

    Three features of Model Runner V2: a worker's batch is a part of the one that is sampled; who keeps how many drafts
    is settled on the GPU; each rank computes the logits of some requests.
    """
    parallel, drafting = worker.parallel_config, worker.vllm_config.speculative_config
    used = {
        "prefill context parallelism": getattr(parallel, "prefill_context_parallel_size", 1) > 1,
        "adaptive verification": bool(getattr(drafting, "enable_adaptive_verification", False)),
        "batch-sharded sampling": getattr(worker.model_runner, "batch_sharder", None) is not None,
    }
    return ", ".join(name for name, here in used.items() if here)


def probe_for(worker: Any) -> EntropyProbe:
    """The probe for a worker's device; on a GPU it takes all memory it will ever need: with the CUDA kernel, or without
    CuPy with torch's operations. Raises KernelError."""
    device = worker.device
    if str(device.type) == "cpu":
        return EntropyProbe()
    if str(device.type) != "cuda":
        raise KernelError(expected_backend(str(device.type))[1])
    config = worker.vllm_config
    drafts = getattr(config.speculative_config, "num_speculative_tokens", 0) or 0
    rows = config.scheduler_config.max_num_seqs * (1 + drafts)
    with warnings.catch_warnings():
        # The log has it.
        warnings.simplefilter("ignore", RuntimeWarning)
        return EntropyProbe(backend="cuda", strict=True, device=device.index or 0, max_rows=rows)


def attach(worker: Any, unfit: Callable[[bool], str]) -> None:
    """Wrap one worker's model runner, on the instance. Ranks whose output is dropped are left alone.

    unfit: what vLLM's runner, V2 or not, lacks for this; empty when nothing.
    """
    if worker.rank % worker.parallel_config.tensor_parallel_size != 0:
        return
    runner = worker.model_runner
    if not hasattr(runner, "sample_tokens") or not hasattr(runner, "execute_model"):
        logger.warning("meridian: no entropy from this worker: its runner has no sample_tokens or no execute_model")
        return
    observer = Observer(runner)
    v2_runner = bool(getattr(worker, "use_v2_model_runner", False))
    try:
        if reason := unfit(v2_runner):
            raise KernelError(reason)
        if found := strewn(worker):
            raise KernelError(f"whose rows of logits are cannot be told with {found}")
        observer.probe = probe_for(worker)
        logger.info("meridian: observing logits on the %s (%s)", worker.device, observer.probe.backend)
        if observer.probe.fallback:
            logger.warning("meridian: entropy costs more than it need: %s", observer.probe.fallback)
    except Exception as error:
        logger.warning("meridian: no entropy from this worker: %s", error)
        observer.guard.switch_off(f"{type(error).__name__}: {error}")
    execute_model, sample_tokens = runner.execute_model, runner.sample_tokens

    @functools.wraps(execute_model)
    def observed_execute(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if observer.guard.fault or observer.delivery.fault:
            observer.come_back()
        observer.guard.run(observer.begin, scheduler_output)
        return execute_model(scheduler_output, *args, **kwargs)

    @functools.wraps(sample_tokens)
    def observed_sample(*args: Any, **kwargs: Any) -> Any:
        observer.guard.run(observer.before_sampling)
        output = sample_tokens(*args, **kwargs)
        observer.delivery.run(_put_now_or_later, observer, output)
        return output

    runner.execute_model, runner.sample_tokens = observed_execute, observed_sample
    if v2_runner:
        _watch_logits(runner.model, observer)


def _watch_logits(model: Any, observer: Observer) -> None:
    compute_logits = model.compute_logits

    @functools.wraps(compute_logits)
    def watched(*args: Any, **kwargs: Any) -> Any:
        logits = compute_logits(*args, **kwargs)
        if logits is not None:
            observer.guard.run(observer.on_logits, logits)
        return logits

    model.compute_logits = watched


def _put_now_or_later(observer: Observer, output: Any) -> None:
    """An asynchronous output exists only once `get_output` is called; the signals ride on what it returns."""
    measurement = observer.take()
    get_output = getattr(output, "get_output", None)
    if get_output is None:
        observer.put(output, measurement)
        return

    def with_signals() -> Any:
        result = get_output()
        observer.delivery.run(observer.put, result, measurement)
        return result

    output.get_output = with_signals
