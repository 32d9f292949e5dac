"""Run builds, each in a process of its own with a control plane of its own, and print the result of each feature.

`python -m tests.engine.matrix [--build NAME]... [--feature NAME]... [--save] [--write]`: `--save` keeps the results of
this Python's vLLM in tests/data/matrix, failures included; `--write` makes the table in the agent's versions.md from
the kept results (alone, it runs no build). At the end the program names the failed features, and then exits with 1.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.engine.matrix import connectors, features_of, grown, results
from tests.engine.matrix.builds import BUILDS, version_here
from tests.processes import ENGINE_ENV, Answering, Process


def run(build: str, folder: Path, features: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Yield a line for each feature of a build as it comes; features without a line have failed."""
    waiting = {f.name: f for f in features_of(build) if not features or f.name in features}
    control = Answering(folder)
    try:
        command = [sys.executable, "-m", "tests.engine.matrix.child", build, control.target, *features]
        env = {
            **ENGINE_ENV,
            **BUILDS[build].environment(),
            # A build's engine would begin with the last settings of the build before, such as its closing text.
            "MERIDIAN_STATE_DIR": str(folder / f"{build}-state"),
            connectors.FOLDER: str(folder / f"{build}-connector"),
            grown.FOLDER: str(folder / f"{build}-model"),
        }
        process = Process(command, folder / f"{build}.log", env)
        try:
            ended = False
            while waiting and not ended:
                ended = process.popen.poll() is not None
                for line in _lines(process):
                    if waiting.pop(line["feature"], None):
                        yield line
                time.sleep(0.2)
        finally:
            process.stop()
    finally:
        control.process.stop()
    if waiting:
        said = {"build": build, "result": results.FAILED, "vllm": version_here(), "seconds": 0.0}
        for name in waiting:
            yield {**said, "feature": name, "detail": f"{process.output()[-3000:]}\nthe engine ended"}


def _lines(process: Process) -> list[dict[str, Any]]:
    whole = process.output().rpartition("\n")[0].splitlines()
    return [json.loads(line) for line in whole if line.startswith('{"build": ')]


def _builds(chosen: Sequence[str]) -> list[str]:
    """Return the builds that can run here and have one of the chosen features, or any feature if none is chosen."""
    here = [name for name, build in BUILDS.items() if build.runs_here()]
    return [name for name in here if not chosen or any(f.name in chosen for f in features_of(name))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", action="append", choices=list(BUILDS))
    parser.add_argument("--feature", action="append", default=[])
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    # SIGTERM ends the engines, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    found = []
    if args.build or args.save or not args.write:
        with tempfile.TemporaryDirectory() as folder:
            for build in args.build or _builds(args.feature):
                came = []
                for line in run(build, Path(folder), args.feature):
                    print(json.dumps(line), flush=True)
                    came.append(line)
                if args.save:
                    results.save(came)
                found += came
    if args.write:
        results.PAGE.write_text(results.with_table(results.PAGE.read_text()))
    failed = [f"failed: {of['build']}: {of['feature']}" for of in found if of["result"] == results.FAILED]
    for name in failed:
        print(name, file=sys.stderr)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
