"""Runs builds, each in a process of its own with a control plane of its own, and says what came of each feature.

`python -m tests.engine.matrix [--build NAME]... [--feature NAME]... [--save] [--write]`: `--save` keeps the results of
this Python's vLLM in tests/data/matrix, `--write` makes the table in meridian_agent/README.md from what is kept (alone,
it runs nothing). Exits with 1 if a feature failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.engine.matrix import features_of, results
from tests.engine.matrix.builds import BUILDS
from tests.processes import ENGINE_ENV, Control, Process

if TYPE_CHECKING:
    from collections.abc import Sequence

BUILD_S = 3600


def run(build: str, folder: Path, features: Sequence[str] = (), timeout_s: float = BUILD_S) -> list[dict[str, Any]]:
    """A line for each feature of a build; those it did not come to have failed."""
    control, log = Control(folder), folder / f"{build}.log"
    try:
        command = [sys.executable, "-m", "tests.engine.matrix.child", build, control.target, *features]
        process = Process(command, log, {**ENGINE_ENV, **BUILDS[build].env})
        try:
            process.popen.wait(timeout_s)
        finally:
            process.stop()
    finally:
        control.process.stop()
    output = process.output()
    lines = [json.loads(line) for line in output.splitlines() if line.startswith('{"build": ')]
    came = {line["feature"] for line in lines}
    missing = [f.name for f in features_of(build) if (not features or f.name in features) and f.name not in came]
    gone = {"build": build, "result": "failed", "detail": f"the engine ended: {output[-3000:]}", "seconds": 0.0}
    return lines + [{**gone, "feature": name, "vllm": lines[0]["vllm"] if lines else ""} for name in missing]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", action="append", choices=list(BUILDS))
    parser.add_argument("--feature", action="append", default=[])
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    found = []
    if args.build or args.save or not args.write:
        with tempfile.TemporaryDirectory() as folder:
            for build in args.build or BUILDS:
                for line in run(build, Path(folder), args.feature):
                    print(json.dumps(line), flush=True)
                    found.append(line)
    if args.save:
        results.save(found)
    if args.write:
        results.README.write_text(results.with_table(results.README.read_text()))
    sys.exit(any(line["result"] == "failed" for line in found))


if __name__ == "__main__":
    main()
