"""What a worker in a process of its own needs: vLLM imports the module of `worker_extension_cls` in each of them."""

from tests.engine.matrix.builds import mask_in_torch


class Extension:
    """Nothing but the name."""


mask_in_torch()
