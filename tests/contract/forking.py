"""A process with the agent's real link that forks many times, as `test_forks` starts it.

Arguments: the server's address, the number of forks, `anew` to restart the stream before each fork, and the files of a
CA and of a token. `anew` and the files may be missing.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import sys
import time
import warnings
from pathlib import Path

from meridian_agent.link import control_stream as link_module
from meridian_agent.link.credentials import AgentCredentials
from tests.fakes.linked import LinkedEngine

# A fork that takes longer, with all that its child does, has hung: the process then prints its stacks and exits. So it
# does if gRPC's core was shut down with the stream, and has no timer thread any more.
STANDS_S = 120.0
STEP_S = 0.003
# Longest delay before a fork, so that forks fall into the moments in which the link closes a channel and opens another
# one, or in which the answer to a report arrives.
DELAY_S = 0.004


def main(target: str, forks: str, anew: str = "", ca: str = "", token_file: str = "") -> None:
    chance = random.Random(3)
    # The link does not wait before the next stream, even if a stream ends at once.
    link_module.SETTLED_S = 0.0
    with LinkedEngine([target], credentials=AgentCredentials(ca=ca, token_file=token_file)) as engine:
        engine.open("a")
        until_connected(engine)
        for _ in range(int(forks)):
            faulthandler.dump_traceback_later(STANDS_S, exit=True)
            engine.step()
            time.sleep(STEP_S)
            if anew:
                until_connected(engine)
                engine.link.restart()
            else:
                engine.step()
            time.sleep(chance.uniform(0, DELAY_S))
            fork()
        faulthandler.cancel_dump_traceback_later()
    print(f"forked {forks} times over {engine.streams} streams", flush=True)
    # One timer thread may end just before the next one begins.
    faulthandler.dump_traceback_later(STANDS_S, exit=True)
    while "grpc_global_tim" not in names_of_threads():
        time.sleep(0.01)
    faulthandler.cancel_dump_traceback_later()


def names_of_threads() -> set[str]:
    """Return the names of this process's threads; a thread that ends meanwhile may be missing."""
    names = set()
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            names.add(path.read_text().strip())
    return names


def until_connected(engine: LinkedEngine) -> None:
    faulthandler.dump_traceback_later(STANDS_S, exit=True)
    while not engine.link.lease.connected:
        engine.step()
        time.sleep(0.001)


def fork() -> None:
    """Fork a child that exits at once, and wait for the child."""
    pid = os.fork()
    if not pid:
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    assert status == 0, f"the child ended with {status}"


if __name__ == "__main__":
    # Python warns about forks of a process with threads, which is what this program tests.
    warnings.simplefilter("ignore", DeprecationWarning)
    main(*sys.argv[1:])
