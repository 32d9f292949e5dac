"""Run the commands of the guide in README.md, one after the other in one shell, and print what they print.

With --write, the guide shows that output below the commands, and pictures of a terminal are drawn from both.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.first_hour import pictures
from tests.processes import ROOT

GUIDE = Path(__file__).with_name("README.md")
BLOCK = re.compile(r"```sh\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", re.DOTALL)
# A line of this text, made up for it, ends the output of a command.
END = "end of the command"
MOST_LINES, MOST_COLUMNS = 14, 118
# Times and ids, which differ in each run, and what the guide shows instead.
TIME = re.compile(r"\d{4}-\d\d-\d\d([T ])\d\d:\d\d:\d\d(\.\d{3}Z)?")
ID = re.compile(r"(?<=-)[0-9a-f]{8}\b|\b[0-9a-f]{16}\b|\b[0-9a-f]{32}\b")


class GuideError(Exception):
    """A command of the guide failed; the text has the output so far."""


def sections() -> dict[str, tuple[list[str], str]]:
    """Return the commands below each heading, in the guide's order, and the output that the guide shows for them."""
    found = {}
    for section in GUIDE.read_text().split("\n## ")[1:]:
        ((commands, output),) = BLOCK.findall(section)
        found[section.partition("\n")[0]] = (re.split(r"(?<!\\)\n", commands.strip()), output)
    return found


def run(ports: dict[str, int] | None = None) -> dict[str, list[str]]:
    """Run all commands and return the output of each by its heading. ports: other ports for those of the guide.

    Raises GuideError.
    """
    script = "set -eo pipefail\ntrap 'kill $ENGINE $CONTROL 2>/dev/null || true' EXIT\n"
    script += "".join(f"{command}\necho '{END}'\n" for commands, _ in sections().values() for command in commands)
    for port, other in (ports or {}).items():
        script = re.sub(rf"\b{port}\b", str(other), script)
    env = {name: value for name, value in os.environ.items() if not name.startswith("MERIDIAN_")}
    env |= {
        "COLUMNS": str(MOST_COLUMNS),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    if ports:
        env |= {"MERIDIAN_SERVER": f"127.0.0.1:{ports['50051']}", "FIRST_HOUR_PORT": str(ports["8000"])}
    with tempfile.TemporaryFile("w+") as output:
        command = ["bash", "-c", script]
        status = subprocess.run(command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT, check=False)
        output.seek(0)
        printed = output.read()
    if status.returncode:
        raise GuideError(printed)
    left = iter(printed.split(f"{END}\n"))
    return {heading: [next(left) for _ in commands] for heading, (commands, _) in sections().items()}


def shown(output: str) -> str:
    """Return what the guide shows of a command's output: no times and ids, not too many lines, and no long ones."""
    output = TIME.sub(lambda time: f"2026-01-01{time[1]}12:00:00{'.000Z' if time[2] else ''}", output)
    output = ID.sub(lambda found: "0123456789abcdef0123456789abcdef"[: len(found[0])], output)
    lines = [line.rstrip() for line in output.strip("\n").splitlines()]
    lines = [line if len(line) <= MOST_COLUMNS else f"{line[: MOST_COLUMNS - 1]}…" for line in lines]
    if len(lines) > MOST_LINES:
        lines = [*lines[: MOST_LINES - 2], "…", lines[-1]]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.first_hour", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the output into the guide, and draw the pictures")
    asked = parser.parse_args()
    outputs = run()
    print("".join(output for several in outputs.values() for output in several))
    if asked.write:
        recorded = {
            heading: [(command, shown(output)) for command, output in zip(commands, outputs[heading], strict=True)]
            for heading, (commands, _) in sections().items()
        }
        left = iter(recorded.values())

        def filled(block: re.Match[str]) -> str:
            text = "\n".join(output for _, output in next(left) if output)
            return f"```sh\n{block[1]}```\n" + (f"\n```text\n{text}\n```\n" if text else "")

        GUIDE.write_text(BLOCK.sub(filled, GUIDE.read_text()))
        for path, picture in pictures.draw(recorded).items():
            path.write_text(picture)


if __name__ == "__main__":
    main()
