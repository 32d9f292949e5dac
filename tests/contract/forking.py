"""A process with the agent's real link that forks over and over, as `test_forks` starts it, until it stands still.

Arguments: the server's address, how many forks, `anew` to have the stream begin anew beside them, and files of a CA and
a token, or none.
"""

from __future__ import annotations

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

# A fork that takes longer, with all that its child does, stands still: then this process says where, and ends.
STANDS_S = 120.0
STEP_S = 0.003
# Longest until the fork: from the stream's end, as its channel is closed and another one opened, or from a report, as
# its answer comes.
DELAY_S = 0.004


def main(target: str, forks: str, anew: str = "", ca: str = "", token_file: str = "") -> None:
    chance = random.Random(3)
    # A stream that ends at once does not make the next one wait.
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
    threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    assert "grpc_global_tim" in threads, "gRPC's core went with the stream"


def until_connected(engine: LinkedEngine) -> None:
    faulthandler.dump_traceback_later(STANDS_S, exit=True)
    while not engine.link.connected:
        engine.step()
        time.sleep(0.001)


def fork() -> None:
    """The child ends at once."""
    pid = os.fork()
    if not pid:
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    assert status == 0, f"the child ended with {status}"


if __name__ == "__main__":
    # That forks are no good with threads is what is tried here.
    warnings.simplefilter("ignore", DeprecationWarning)
    main(*sys.argv[1:])
