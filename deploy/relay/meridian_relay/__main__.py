"""The entry point of `meridian-relay`, which is also `python -m meridian_relay`."""

import signal
import sys
from importlib import import_module


def run() -> int:
    # The first process of a container ignores a signal until it handles it, and would go on to start and to serve.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    return int(import_module("meridian_relay.main").main())


if __name__ == "__main__":
    sys.exit(run())
