"""The entry point of `meridian-relay`, which is also `python -m meridian_relay`."""

import signal
import sys
from importlib import import_module


def run() -> int:
    # The first process of a container ignores the signal until it handles it, and would go on to start and to serve.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    return int(import_module("meridian_relay.main").main())


if __name__ == "__main__":
    sys.exit(run())
