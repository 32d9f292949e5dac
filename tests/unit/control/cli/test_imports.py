"""What `meridianctl` loads."""

from __future__ import annotations

import subprocess
import sys


def test_a_replay_needs_no_database_and_no_server() -> None:
    """A replay has the capabilities, whose parts over a fleet load a store only in a control plane."""
    code = "import sys, meridian_control.cli.main, meridian_control.offline.policy_replay; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "meridian_control.capabilities.budgets.fleet" in loaded
    assert not {"sqlalchemy", "asyncpg", "aiohttp", "meridian_control.server"} & set(loaded)
