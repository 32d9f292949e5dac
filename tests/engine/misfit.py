"""Load the plugin where the agent cannot run: `python -m tests.engine.misfit version|hook|address`.

Either vLLM's version is outside the supported ones, or a method that the agent needs is gone, or the environment names
no usable address. The program fails if vLLM is not stock afterwards.
"""

from __future__ import annotations

import sys


def main() -> None:
    import vllm
    from vllm.config.scheduler import SchedulerConfig
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    from meridian_agent.plugin import register

    if sys.argv[1] == "version":
        vllm.__version__ = "0.99.0"
    elif sys.argv[1] == "hook":
        del Scheduler._preempt_request
    register()
    assert not hasattr(WorkerWrapperBase.init_device, "__wrapped__")
    assert not hasattr(ChatCompletionRequest.to_sampling_params, "__wrapped__")
    chosen = SchedulerConfig.get_scheduler_cls(SchedulerConfig.default_factory())
    assert "meridian" not in str(chosen.__mro__), chosen


if __name__ == "__main__":
    main()
