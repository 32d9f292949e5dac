"""On PYTHONPATH, lets Triton's interpreter stand in for a GPU backend, so that Model Runner V2 runs on the CPU."""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    import triton.backends

    class _Driver:
        @staticmethod
        def is_active() -> bool:
            return True

    class _Backend:
        driver = _Driver
        compiler = None

    triton.backends.backends["cpu"] = _Backend()
