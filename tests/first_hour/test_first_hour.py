"""The guide's commands, run in their order on a real engine: `make test-first-hour`.

The guide's output and pictures come from one run.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

from meridian_control import __version__
from tests.first_hour.__main__ import run, sections, shown
from tests.first_hour.pictures import FOLDER, PICTURES, prompted
from tests.processes import ROOT, free_port

# What each heading's commands print, in the order of the guide.
PRINTS = (
    "",
    "",
    "",
    "thinking ended: the model ended it",
    "first rule to fire",
    "a.trace: ",
    "at most the allowed 2.0 points",
    "running",
    "meridian_engines 1.0",
    "as at first",
    "",
)


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_every_command_of_the_guide_runs() -> None:
    ports = {port: free_port() for port in ("50051", "9464", "9465", "8000")}
    outputs = run(ports)
    assert len(outputs) == len(PRINTS)
    for output, words in zip(outputs.values(), PRINTS, strict=True):
        assert words in "".join(output)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_readmes_installation_in_a_fresh_copy(tmp_path: Path) -> None:
    (commands,) = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    copy = tmp_path / "meridian"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(copy)], check=True)
    done = subprocess.run(["bash", "-ec", commands], cwd=copy, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{__version__}\n"), done.stderr
    program = copy / "build" / "control" / "bin" / "meridianctl"
    assert subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.endswith("\n")


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_shows_what_the_guide_says(name: str) -> None:
    """`python -m tests.first_hour --write` writes both."""
    file = FOLDER / f"{name}.svg"
    texts = ElementTree.parse(file).iter("{http://www.w3.org/2000/svg}text")
    drawn = [line for text in texts if (line := "".join(text.itertext()).replace("\xa0", " ").rstrip())]
    guide = [sections()[heading] for heading in PICTURES[name]]
    typed = [line for commands, _ in guide for command in commands for line in prompted(command)]
    printed = [line for _, output in guide for line in output.splitlines() if line]
    assert [line for line in drawn if line in typed] == typed
    assert [line for line in drawn if line not in typed] == printed
    assert "url(http" not in file.read_text()
    assert file.stat().st_size < 30_000


def test_the_guide_shows_neither_times_nor_ids() -> None:
    said = "request chatcmpl-ask-3-b084f714 on first (347ed9b1e0f7451c86d279c224e4b4d4), 1472674 bytes\n"
    said += "opened 2026-11-23T13:16:48.596Z, until 2026-11-23 13:29:16 UTC, etag 6c2436b0674c9d0f"
    assert shown(said).splitlines() == [
        "request chatcmpl-ask-3-01234567 on first (0123456789abcdef0123456789abcdef), 1472674 bytes",
        "opened 2026-01-01T12:00:00.000Z, until 2026-01-01 12:00:00 UTC, etag 0123456789abcdef",
    ]


def test_the_guide_leaves_out_the_middle_of_much_and_the_end_of_long_lines() -> None:
    lines = shown("\n".join(f"{n} {'x' * n * 10}" for n in range(20))).splitlines()
    assert len(lines) == 14
    assert [line for line in lines if line.endswith("…")] == ["…", f"19 {'x' * 114}…"]
