"""`meridian_control.load_config` and `MeridianConfig`, with which other programs read a policy file."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import meridian_control
from meridian_control import MeridianConfig, PolicyError, load_config
from meridian_control.policy.model import Policy

if TYPE_CHECKING:
    from pathlib import Path


def test_a_file_is_read(tmp_path: Path) -> None:
    """A file is read by its path or the path as a string; the result is the policy itself, with every default."""
    file = tmp_path / "meridian.toml"
    file.write_text('[entropy]\nema_alpha = 0.1\n[model."Qwen/Qwen3-8B"]\nreasoning_parser = "qwen3"\n')
    for path in (file, str(file)):
        config = load_config(path)
        assert isinstance(config, MeridianConfig)
        assert (config.entropy.ema_alpha, config.scheduler.max_think_tokens) == (0.1, 32_768)
    assert MeridianConfig is Policy
    assert repr(MeridianConfig()).startswith("MeridianConfig(scheduler=")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[entropy]\nema_alpha = 1.5", "entropy.ema_alpha must be in (0, 1]; got 1.5"),
        ("[entropy]\nema_alpha = true", "entropy.ema_alpha must be a number; got true"),
        ("[scheduler]\nmax_think_tokens = '8k'", 'scheduler.max_think_tokens must be an integer; got "8k"'),
        ("[scheduler]\nmax_thinks = 1", "scheduler.max_thinks is not a known key"),
        ("[entropi]\nema_alpha = 1", "entropi is not a known key"),
        ("entropy = 3", "entropy must be a table; got 3"),
        ("[entropy\nema_alpha = 1", "meridian.toml: line 1, column 9"),
        (None, "meridian.toml: cannot be read: No such file or directory"),
    ],
)
def test_what_is_wrong_is_a_value_error_that_says_where(tmp_path: Path, text: str | None, complaint: str) -> None:
    file = tmp_path / "meridian.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=re.escape(complaint)) as refused:
        load_config(file)

    assert isinstance(refused.value, PolicyError)


def test_every_bad_field_is_listed(tmp_path: Path) -> None:
    (file := tmp_path / "meridian.toml").write_text("[entropy]\nema_alpha = 0\neat_warmup_samples = 0\n")
    with pytest.raises(PolicyError) as refused:
        load_config(file)
    assert [v.path for v in refused.value.violations()] == ["entropy.ema_alpha", "entropy.eat_warmup_samples"]


def test_the_package_alone_imports_nothing() -> None:
    code = "import meridian_control, sys; sys.exit(any(m in sys.modules for m in ('pydantic', 'grpc', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        meridian_control.nothing  # noqa: B018
