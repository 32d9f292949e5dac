"""Run a soak with random requests, faults and policies: `python -m tests.soak --seconds 1200 --seed 1`.

The traces, the time series and all logs are written to --out; the last line printed is JSON. The exit
status is 1 if a request failed or a check found a violation. A seed determines what is drawn, but not at which moment
it happens, because real processes run on a real clock.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from pathlib import Path

from tests.soak.run import Soak, stock


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=1200.0, help="duration of requests and faults")
    parser.add_argument("--seed", type=int, default=None, help="default: any")
    parser.add_argument(
        "--clients", type=int, default=6, help="number of clients, each of which sends one request after the other"
    )
    parser.add_argument(
        "--stock", action="store_true", help="run stock vLLM under the same clients, to compare its growth"
    )
    parser.add_argument("--out", type=Path, help="a new folder; default: a temporary one")
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(1 << 31)
    out = arguments.out or Path(tempfile.mkdtemp(prefix="meridian-soak-"))
    out.mkdir(parents=True, exist_ok=True)
    print(f"seed {seed}, {arguments.seconds:.0f} s, output in {out}", flush=True)
    given = out.resolve(), seed, arguments.seconds, arguments.clients
    summary = asyncio.run(stock(*given) if arguments.stock else Soak(*given).run())
    print(json.dumps(summary))
    return 1 if summary["failed"] or summary["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
