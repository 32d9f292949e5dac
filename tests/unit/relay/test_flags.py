"""Bad flags of `meridian-relay` are named with their values."""

from __future__ import annotations

import pytest

from meridian_relay.main import main

GOOD = ["--thinking", "http://127.0.0.1:1", "--metrics-listen", ""]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--thinking", "a:8000"], "--thinking must be http://host:port or https://host:port; got 'a:8000'"),
        (["--thinking", "http://a:b"], "--thinking must be http://host:port or https://host:port; got 'http://a:b'"),
        (["--thinking", "http://a/v1"], "got 'http://a/v1'"),
        (["--listen", "8000"], "--listen: an address must be host:port or :port; got '8000'"),
        (["--listen", "127.0.0.1:0", "--metrics-listen", "x"], "--metrics-listen: an address must be"),
        (["--think-end", ""], "--think-end must not be empty; got ''"),
        (["--drain-s", "-1"], "--drain-s must be a number of seconds, at least 0; got -1.0"),
    ],
)
def test_bad_flags(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GOOD, *flags]) == 2
    assert said in capsys.readouterr().err
