"""Run the commands of the guide in README.md, one after the other in one shell, and print what they print.

With --write, the guide shows that output below the commands.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.processes import ROOT

GUIDE = Path(__file__).with_name("README.md")
BLOCK = re.compile(r"```sh\n(.*?)```\n(?:\n```text\n.*?```\n)?", re.DOTALL)
# A line of this text, made up for it, ends the output of a block of commands.
END = "end of the block"
MOST_LINES = 14


class GuideError(Exception):
    """A command of the guide failed; the text has the output so far."""


def blocks() -> list[str]:
    """Return the blocks of commands in the guide's order."""
    return BLOCK.findall(GUIDE.read_text())


def run(ports: dict[str, int] | None = None) -> list[str]:
    """Run all blocks and return the output of each. ports: other ports for those of the guide. Raises GuideError."""
    script = "set -eo pipefail\ntrap 'kill $ENGINE $CONTROL 2>/dev/null || true' EXIT\n"
    script += "".join(f"{commands}echo '{END}'\n" for commands in blocks())
    for port, other in (ports or {}).items():
        script = re.sub(rf"\b{port}\b", str(other), script)
    env = {name: value for name, value in os.environ.items() if not name.startswith("MERIDIAN_")}
    env |= {"COLUMNS": "118", "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    if ports:
        env |= {"MERIDIAN_SERVER": f"127.0.0.1:{ports['50051']}", "FIRST_HOUR_PORT": str(ports["8000"])}
    with tempfile.TemporaryFile("w+") as output:
        command = ["bash", "-c", script]
        status = subprocess.run(command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT, check=False)
        output.seek(0)
        printed = output.read()
    if status.returncode:
        raise GuideError(printed)
    return [part.strip("\n") for part in printed.split(f"{END}\n")[:-1]]


def shown(output: str) -> str:
    """Return what the guide shows of an output: no trailing blanks, and neither too long nor too many lines."""
    lines = [line[:118].rstrip() for line in output.splitlines()]
    if len(lines) > MOST_LINES:
        lines = [*lines[: MOST_LINES - 2], "…", lines[-1]]
    return "\n".join(lines).strip("\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.first_hour", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the output into the guide")
    asked = parser.parse_args()
    outputs = run()
    print("\n\n".join(outputs))
    if asked.write:
        left = iter(outputs)

        def filled(block: re.Match[str]) -> str:
            text = shown(next(left))
            return f"```sh\n{block[1]}```\n" + (f"\n```text\n{text}\n```\n" if text else "")

        GUIDE.write_text(BLOCK.sub(filled, GUIDE.read_text()))


if __name__ == "__main__":
    main()
