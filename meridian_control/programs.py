"""The entry points of the programs. Each says in one line which extra is missing, if the package was installed without.

The module imports only the standard library, because the agent's installation has none of the programs' packages.
"""

import signal
import sys
from importlib import import_module

# Distributions' own packages, whose absence is a fault of the installation that no extra mends.
OWN = ("meridian", "meridian_control")


def control() -> int:
    # The first process of a container ignores a signal until it handles it, and would go on to start and to serve.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    return _run("meridian-control", "meridian_control.app.main")


def ctl() -> int:
    return _run("meridianctl", "meridian_control.cli.main")


def _run(program: str, module: str) -> int:
    # Ctrl-C during the imports, which take a second, ends the program without a traceback.
    raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    try:
        if raises:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        main = import_module(module).main
        if raises:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in OWN:
            raise
        print(
            f"{program}: the package {missing} is not installed: pip install 'meridian-llm[control]'", file=sys.stderr
        )
        return 2
    return int(main() or 0)
