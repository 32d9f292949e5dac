"""`meridian_control.load_config` and `MeridianConfig`, with which other programs read a policy file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import meridian_control
from meridian_control import MeridianConfig, PolicyError, load_config
from meridian_control.policy.model import Policy


def test_a_file_is_read(tmp_path: Path) -> None:
    """A file is read by its path or the path as a string. The result is the policy itself, with every default; a value
    that is wrong is a ValueError, too."""
    file = tmp_path / "meridian.toml"
    file.write_text('[entropy]\nema_alpha = 0.1\n[model."Qwen/Qwen3-8B"]\nreasoning_parser = "qwen3"\n')
    for path in (file, str(file)):
        config = load_config(path)
        assert isinstance(config, MeridianConfig)
        assert (config.entropy.ema_alpha, config.scheduler.max_think_tokens) == (0.1, 32_768)
    assert MeridianConfig is Policy
    assert repr(MeridianConfig()).startswith("MeridianConfig(scheduler=")
    assert issubclass(PolicyError, ValueError)


def test_the_package_alone_imports_nothing() -> None:
    code = "import meridian_control, sys; sys.exit(any(m in sys.modules for m in ('pydantic', 'grpc', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        meridian_control.nothing  # noqa: B018
