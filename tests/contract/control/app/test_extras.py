"""The programs of an installation without the extra that they need say so in one line."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib

import pytest

from tests.processes import ROOT

# Runs a console script as an installation makes it, without the packages of the extra `control`.
SCRIPT = """
import importlib.abc, importlib.util, sys
entry, missing = sys.argv[1], set(sys.argv[2].split(","))
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
module, function = entry.split(":")
sys.argv = [function, "--help"]
sys.exit(getattr(importlib.import_module(module), function)())
"""
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Packages of the extra, as Python imports them.
PACKAGES = {
    "aiohttp", "aiosqlite", "asyncpg", "cryptography", "grpc_health", "grpc_reflection", "grpc_status",
    "prometheus_client", "pydantic", "jwt", "rich", "sqlalchemy", "tomli_w", "typer", "watchfiles", "yaml",
}  # fmt: skip


def test_the_extra_is_known() -> None:
    assert len(PACKAGES) == len(PROJECT["optional-dependencies"]["control"])


def run(program: str, missing: set[str]) -> subprocess.CompletedProcess[str]:
    entry = PROJECT["scripts"][program]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SCRIPT, entry, ",".join(missing)]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("program", PROJECT["scripts"])
def test_a_program_without_its_extra(program: str) -> None:
    ended = run(program, PACKAGES)
    assert (ended.returncode, ended.stdout) == (2, "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"{program}: the package ")
    assert line.endswith(" is not installed: pip install 'meridian-llm[control]'")


@pytest.mark.parametrize("program", PROJECT["scripts"])
def test_a_program_with_its_extra(program: str) -> None:
    ended = run(program, {"nothing"})
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_fault_of_the_installation_is_not_hidden() -> None:
    ended = run("meridianctl", {"meridian"})
    assert "Traceback" in ended.stderr
