"""Wraps the methods of a worker's model runner, so that an `Observer` measures each step's logits and puts the signals
on the runner's output."""

from __future__ import annotations

import functools
import logging
import warnings
from typing import TYPE_CHECKING, Any

from meridian_kernels import EntropyProbe, KernelError

from meridian_agent.core.step_signals import expected_backend
from meridian_agent.worker.observer import Observer
from meridian_agent.worker.probe_rows import ProbeRows, ProbeRowsV2

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger("vllm.meridian")


def strewn(worker: Any) -> str:
    """Return the vLLM features in use that keep a worker from knowing which request a row of logits belongs to; empty
    if none is in use.

    Model Runner V2 has three such features. With prefill context parallelism a worker has only a part of the batch that
    is sampled; with adaptive verification the GPU decides how many drafts each request keeps; with batch-sharded
    sampling each rank computes the logits of some of the requests only.
    """
    parallel, drafting = worker.parallel_config, worker.vllm_config.speculative_config
    used = {
        "prefill context parallelism": getattr(parallel, "prefill_context_parallel_size", 1) > 1,
        "adaptive verification": bool(getattr(drafting, "enable_adaptive_verification", False)),
        "batch-sharded sampling": getattr(worker.model_runner, "batch_sharder", None) is not None,
    }
    return ", ".join(name for name, here in used.items() if here)


def probe_for(worker: Any) -> EntropyProbe:
    """Return the probe for a worker's device. On a CPU the probe compiles its code now. On a GPU the probe allocates
    all its memory now, and it uses the CUDA kernel or, without CuPy, torch's operations. Raises KernelError."""
    device = worker.device
    if str(device.type) == "cpu":
        probe = EntropyProbe()
        probe.compile()
        return probe
    if str(device.type) != "cuda":
        raise KernelError(expected_backend(str(device.type))[1])
    config = worker.vllm_config
    drafts = getattr(config.speculative_config, "num_speculative_tokens", 0) or 0
    # A request has a row for its next token, and one for each of its drafts, or one for its probe.
    rows = config.scheduler_config.max_num_seqs * (1 + max(drafts, 1))
    with warnings.catch_warnings():
        # `attach` logs the probe's fallback, so the warning would only repeat it.
        warnings.simplefilter("ignore", RuntimeWarning)
        return EntropyProbe(backend="cuda", strict=True, device=device.index or 0, max_rows=rows)


def attach(worker: Any, unfit: Callable[[bool], str], no_probe_rows: Callable[[bool], str]) -> None:
    """Wrap the methods of one worker's model runner, on the instance. Tensor-parallel ranks past the first are not
    wrapped, because vLLM drops their output.

    unfit: returns what the model runner (V2 if its argument is true) lacks for measuring; empty if nothing is missing.
    no_probe_rows: returns what this vLLM and model runner lack for probes that are rows of their requests; empty if
    nothing is missing. Without that the worker does not know the newest tokens either.
    """
    if worker.rank % worker.parallel_config.tensor_parallel_size != 0:
        return
    runner = worker.model_runner
    if not hasattr(runner, "sample_tokens") or not hasattr(runner, "execute_model"):
        logger.warning(
            "meridian: this worker does not measure entropy: its model runner has no sample_tokens or no execute_model"
        )
        return
    observer = Observer(runner)
    v2_runner = bool(getattr(worker, "use_v2_model_runner", False))
    try:
        if reason := unfit(v2_runner):
            raise KernelError(reason)
        if features := strewn(worker):
            raise KernelError(f"with {features} a worker cannot tell which request a row of logits belongs to")
        observer.probe = probe_for(worker)
        logger.info("meridian: measuring logits on device %s with backend %s", worker.device, observer.probe.backend)
        if observer.probe.fallback:
            logger.warning("meridian: measuring entropy is slower than it could be: %s", observer.probe.fallback)
    except Exception as error:
        logger.warning("meridian: this worker does not measure entropy: %s", error)
        observer.guard.switch_off(f"{type(error).__name__}: {error}")
    drafting = worker.vllm_config.speculative_config is not None
    if not (drafting or observer.guard.fault or no_probe_rows(v2_runner)):
        observer.probe_rows = ProbeRowsV2(runner) if v2_runner else ProbeRows(runner)
        # A GPU measures while it samples. Under asynchronous scheduling the newest tokens may still be unknown.
        may_be_unknown = v2_runner or worker.vllm_config.scheduler_config.async_scheduling
        observer.knows_newest = worker.device.type == "cpu" and not may_be_unknown
    _watch_steps(runner, observer)
    if v2_runner:
        _watch_logits(runner.model, observer)
    _watch_weights(worker, observer)


def _watch_steps(runner: Any, observer: Observer) -> None:
    """Wrap the methods of a runner that compute a step and sample its tokens."""
    probe_rows = observer.probe_rows
    execute_model, sample_tokens = runner.execute_model, runner.sample_tokens

    @functools.wraps(execute_model)
    def observed_execute(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        observer.is_idle = bool(observer.guard.run(observer.begins_idle, scheduler_output))
        if observer.is_idle:
            return execute_model(scheduler_output, *args, **kwargs)
        if observer.guard.fault or observer.delivery.fault:
            observer.come_back()
        observer.guard.run(observer.begin, scheduler_output)
        return execute_model(scheduler_output, *args, **kwargs)

    @functools.wraps(sample_tokens)
    def observed_sample(*args: Any, **kwargs: Any) -> Any:
        if observer.is_idle:
            return sample_tokens(*args, **kwargs)
        if isinstance(probe_rows, ProbeRows):
            # Rows must leave vLLM's logits also while the guard rests after a fault.
            try:
                probe_rows.split()
            except Exception as error:
                observer.guard.trip(probe_rows.split, error)
        observer.guard.run(observer.before_sampling)
        output = sample_tokens(*args, **kwargs)
        observer.delivery.run(_put_now_or_later, observer, output)
        return output

    runner.execute_model, runner.sample_tokens = observed_execute, observed_sample


def _watch_logits(model: Any, observer: Observer) -> None:
    compute_logits = model.compute_logits

    @functools.wraps(compute_logits)
    def watched(*args: Any, **kwargs: Any) -> Any:
        logits = compute_logits(*args, **kwargs)
        if logits is not None and not observer.is_idle:
            observer.guard.run(observer.on_logits, logits)
        return logits

    model.compute_logits = watched


def _watch_weights(worker: Any, observer: Observer) -> None:
    """Let the observer learn of each replacement of the weights: by vLLM's own methods, and by all that loads weights
    through the model, as trainers' extensions of the worker do. Who writes into the parameters is not noticed."""
    runner = worker.model_runner

    def watch(owner: Any, name: str, is_from_files: Callable[..., bool] = lambda *args, **kwargs: False) -> None:
        replace = getattr(owner, name, None)
        if replace is None:
            return

        @functools.wraps(replace)
        def watched(*args: Any, **kwargs: Any) -> Any:
            # Also a replacement that fails half-way leaves other weights behind.
            observer.replaced_weights(None)
            result = replace(*args, **kwargs)
            if is_from_files(*args, **kwargs):
                observer.replaced_weights(str(runner.model_config.model))
            return result

        setattr(owner, name, watched)

    watch(runner.get_model(), "load_weights")
    watch(worker, "update_weights")
    watch(runner, "reload_weights", lambda weights_iterator=None, *args, **kwargs: weights_iterator is None)


def _put_now_or_later(observer: Observer, output: Any) -> None:
    """Put the signals on a step's output. An asynchronous output exists only once `get_output` is called, so the
    signals are put on what `get_output` returns."""
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
