"""`meridianctl` names arguments that are no text, and output that cannot be written."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.processes import MERIDIANCTL


def test_an_argument_that_is_no_text() -> None:
    ended = subprocess.run([*MERIDIANCTL, "explain", b"\xff"], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (2, "the arguments must be UTF-8\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_output_that_cannot_be_written() -> None:
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run([*MERIDIANCTL, "--help"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (1, "cannot write the output: No space left on device\n")


def test_output_that_is_closed() -> None:
    command = ["sh", "-c", 'exec "$@" >&-', "sh", *MERIDIANCTL, "engines"]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (1, "cannot write the output: standard output is closed\n")
