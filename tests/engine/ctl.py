"""Runs meridianctl against the control plane of an engine test."""

from __future__ import annotations

from typer.testing import CliRunner

from meridian_control.cli.main import app
from tests.processes import Control


def ctl(control: Control, *args: str) -> str:
    """Return what a command prints; the command must succeed."""
    result = CliRunner().invoke(app, ["--server", control.target, *args])
    assert result.exit_code == 0, result.output
    return result.output
