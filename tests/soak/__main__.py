"""`python -m tests.soak --seconds 1200 --seed 1`: requests, faults and policies at random; the last line is JSON.

Writes the traces, the time series, their picture and all logs to --out. Exit code 1 when a request failed or something
was violated. A seed says what is drawn, not when it meets what: real processes run on a real clock.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from pathlib import Path

from tests.soak import alone
from tests.soak.run import Soak


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=1200.0, help="how long requests and faults go on")
    parser.add_argument("--seed", type=int, default=None, help="default: any")
    parser.add_argument("--clients", type=int, default=6, help="each asks one thing after the other")
    parser.add_argument(
        "--stock", action="store_true", help="stock vLLM under the same clients, to compare growth with"
    )
    parser.add_argument("--out", type=Path, help="a new folder; default: a temporary one")
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(1 << 31)
    out = arguments.out or Path(tempfile.mkdtemp(prefix="meridian-soak-"))
    out.mkdir(parents=True, exist_ok=True)
    print(f"seed {seed}, {arguments.seconds:.0f} s, output in {out}", flush=True)
    given = out.resolve(), seed, arguments.seconds, arguments.clients
    summary = asyncio.run(alone.run(*given) if arguments.stock else Soak(*given).run())
    print(json.dumps(summary))
    return 1 if summary["failed"] or summary["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
