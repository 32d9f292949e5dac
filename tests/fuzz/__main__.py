"""Fuzz every target in turn: `python -m tests.fuzz --seconds 600 --seed 1`.

`--target NAME` fuzzes one target. Failing cases are reduced and written to tests/data/fuzz/NAME, to be fixed and
committed. The last line counts cases and failures. The exit status is 1 if a case failed.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
import warnings

from tests.fuzz.targets import CORPUS, TARGETS, where

# Number of cases of one target before the next target has its turn.
TURN = 20


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the first case; the other cases have the following seeds"
    )
    parser.add_argument("--target", choices=sorted(TARGETS), action="append")
    arguments = parser.parse_args()
    warnings.simplefilter("error")
    targets = [TARGETS[name] for name in arguments.target or TARGETS]
    until = time.monotonic() + arguments.seconds
    seed, cases = arguments.seed, 0
    failures: dict[str, str] = {}
    while time.monotonic() < until:
        for target in targets:
            for number in range(seed, seed + TURN):
                cases += 1
                case = target.case(number)
                if (error := target.failure(case)) is None:
                    continue
                what = f"{target.name}: {where(error)}"
                if what in failures:
                    continue
                content = target.dump(target.reduced(case))
                name = hashlib.sha256(content).hexdigest()[:12]
                path = CORPUS / target.name / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
                failures[what] = f"seed {number}, kept as {path}: {error}"
                print(f"{what}, {failures[what]}")
        seed += TURN
    print(f"{cases} cases, {len(failures)} failures, seeds {arguments.seed} to {seed - 1}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
