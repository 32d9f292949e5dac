"""Installs the agent in vLLM by wrapping the two functions through which vLLM builds schedulers and workers, the
requests of its API servers, the statistics that its front ends expose, and the causes of their aborts.

`install` runs in every vLLM process (front end, engine core, workers), but each wrapper acts only in the process that
calls it. Importing this module does not touch a GPU.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

from meridian_agent.core import plain_log
from meridian_agent.link.identity import targets
from meridian_agent.link.sender_settings import request_sources
from meridian_agent.vllm_adapter import (
    chat_rendering,
    client_effort,
    core_shutdown,
    front_end_aborts,
    gateway,
    kv_connectors,
    required_api,
    server_metrics,
    stop_strings,
)
from meridian_agent.vllm_adapter.version import Unsupported, unfit, unfit_probe_rows, unfit_worker, vllm_version

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger("vllm.meridian")

_INSTALLED = "_meridian_installed"


def reach_ray() -> None:
    """Let vLLM hand the agent's variables to the actors that it starts on a Ray cluster, where they are not set. The
    variable in which vLLM takes further prefixes would change the keys of its compilation cache."""
    if lacks := required_api.missing(required_api.Imported(), required_api.RAY):
        logger.info("meridian: vLLM lacks %s: it hands no MERIDIAN_ variable to actors on Ray", ", ".join(lacks))
        return
    from vllm.ray.ray_env import DEFAULT_ENV_VAR_PREFIXES

    DEFAULT_ENV_VAR_PREFIXES.add("MERIDIAN_")


# Parts of the agent in vLLM's front ends, each with what is lost without it; the engine needs none of them.
OPTIONAL = (
    ("efforts that clients name in vLLM's APIs", client_effort.install),
    (
        "how clients' chats are rendered, so that their finished thinking stays in the prefix cache",
        chat_rendering.install,
    ),
    ("tenants and SLO classes that a gateway names", lambda: gateway.install(request_sources())),
    ("phases in vLLM's own metrics", server_metrics.install),
    ("the difference between a stop string and a client that has gone", front_end_aborts.install),
    ("stop strings that sleep while the model thinks", stop_strings.install),
    ("the end of the stream before the engine's workers exit", core_shutdown.install),
    ("workers and engines that vLLM starts on Ray", reach_ray),
)


def install() -> None:
    """Wrap the two functions through which vLLM builds schedulers and workers, the requests of its API servers, the
    statistics that its front ends expose, and the causes of their aborts.

    If this vLLM cannot host the agent, only the choice of the scheduler class is wrapped, so that the engine core tells
    the control plane why; then Unsupported is raised.
    """
    from vllm.config.scheduler import SchedulerConfig
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    if getattr(SchedulerConfig, _INSTALLED, False):
        return
    plain_log.install()
    if not targets():
        logger.error("meridian: MERIDIAN_CONTROL names no usable address: this process runs stock vLLM")
        return
    setattr(SchedulerConfig, _INSTALLED, True)
    if reason := unfit():
        _after_choosing(SchedulerConfig, functools.partial(_say_absent, reason))
        raise Unsupported(reason)
    _after_choosing(SchedulerConfig, _governed)
    _wrap_worker(WorkerWrapperBase)
    for lost, part in OPTIONAL:
        try:
            part()
        except Exception:
            logger.exception("meridian: the agent works without %s", lost)
    logger.info("meridian: agent installed in vLLM %s", vllm_version())


def _after_choosing(config_class: Any, then: Callable[[type], type]) -> None:
    """Let `then` replace every scheduler class that vLLM chooses. Only the engine core chooses a scheduler class."""
    original = config_class.get_scheduler_cls

    @functools.wraps(original)
    def get_scheduler_cls(self: Any) -> type:
        chosen: type = original(self)
        try:
            return then(chosen)
        except Exception:
            logger.exception("meridian: the scheduler class %s runs without the agent", chosen)
            return chosen

    config_class.get_scheduler_cls = get_scheduler_cls


def _governed(chosen: type) -> type:
    """Return a subclass of the chosen scheduler class that has the agent's mixin in front."""
    from meridian_agent.engine.scheduler_mixin import governed

    return governed(chosen)


def _say_absent(reason: str, chosen: Any) -> type:
    """Return a subclass of the chosen scheduler class that says why there is no agent, under the name of its rank."""
    from meridian_agent.engine.absence import say_absent

    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        chosen.__init__(self, *args, **kwargs)
        say_absent(reason, self)

    return type(chosen.__name__, (chosen,), {"__init__": begin, "__module__": chosen.__module__})


def _wrap_worker(wrapper_class: Any) -> None:
    """Attach an observer to each worker after it has loaded its model, and hide probes from the worker's KV connector
    after the connector exists.

    vLLM loads plugins inside `init_worker`, and `init_device` is the first of its calls after that.
    """
    original = wrapper_class.init_device

    @functools.wraps(original)
    def init_device(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        try:
            from meridian_agent.worker.attach import attach

            attaching = functools.partial(attach, self.worker, unfit_worker, unfit_probe_rows)
            _after(self.worker, "load_model", attaching)
        except Exception:
            logger.exception("meridian: this worker does not measure entropy")
        try:
            _after(self.worker, "initialize_from_config", _hide_from_worker_connector)
        except Exception:
            logger.exception("meridian: the KV connector of this worker will see the ids of finished probes")
        return result

    wrapper_class.init_device = init_device


def _hide_from_worker_connector() -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if has_kv_transfer_group():
        kv_connectors.hide_finished(get_kv_transfer_group())


def _after(owner: Any, name: str, then: Callable[[], None]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        try:
            then()
        except Exception:
            logger.exception("meridian: the agent's part of the worker's %s failed", name)
        return result

    setattr(owner, name, call)
