"""Control plane, agent and relay escape control characters in the same way, also when no file can be opened."""

from __future__ import annotations

import subprocess
import sys

import pytest

MODULES = ["meridian_control.common.plain_text", "meridian_agent.core.plain_log", "meridian_relay.log"]
# Python reads the module of a codec that was not used before from a file.
PROGRAM = """
import importlib, os, resource, sys
printable = importlib.import_module(sys.argv[1]).printable
resource.setrlimit(resource.RLIMIT_NOFILE, (os.dup(0), resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
print(ascii(printable("é\\n\\x1b\\u202e\\ud800\\U000e0001")))
"""


@pytest.mark.parametrize("module", MODULES)
def test_a_log_needs_no_open_file(module: str) -> None:
    said = subprocess.run([sys.executable, "-c", PROGRAM, module], capture_output=True, text=True, check=False)
    assert (said.stdout, said.stderr) == (ascii("é\\n\\x1b\\u202e\\ud800\\U000e0001") + "\n", "")
