"""A worker extension in a module of its own, because vLLM imports `worker_extension_cls` in each worker process."""

from tests.engine.matrix.builds import mask_in_torch


class Extension:
    """An empty worker extension; only its name is needed."""


mask_in_torch()
