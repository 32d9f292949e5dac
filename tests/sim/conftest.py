"""Ignore the many warnings of vLLM and of its dependencies, which are not errors of the project."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
        import vllm.v1.core.sched.async_scheduler
        import vllm.v1.structured_output  # noqa: F401
        from vllm.engine.arg_utils import EngineArgs  # noqa: F401
    except ImportError:
        pass
