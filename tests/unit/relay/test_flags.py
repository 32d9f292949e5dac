"""Bad flags of `meridian-relay` are named with their values."""

from __future__ import annotations

import pytest

from meridian_relay.main import main, parser

GOOD = ["--thinking", "http://127.0.0.1:1", "--metrics-listen", ""]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--thinking", "a:8000"], "--thinking must be http://host:port or https://host:port; got 'a:8000'"),
        (["--thinking", "http://a:b"], "--thinking must be http://host:port or https://host:port; got 'http://a:b'"),
        (["--thinking", "http://a/v1"], "got 'http://a/v1'"),
        (["--thinking", "http://a:0"], "got 'http://a:0'"),
        (["--thinking", "http://a:8000?"], "got 'http://a:8000?'"),
        (["--thinking", "http://a:8000#"], "got 'http://a:8000#'"),
        (["--thinking", "http://user:key@a:8000"], "got 'http://user:key@a:8000'"),
        (["--thinking", "http://a:8000 http://b:8000"], "got 'http://a:8000 http://b:8000'"),
        (["--thinking", " http://a:8000"], "got ' http://a:8000'"),
        (["--listen", "8000"], "--listen: an address must be host:port or :port; got '8000'"),
        (["--listen", "127.0.0.1:0", "--metrics-listen", "x"], "--metrics-listen: an address must be"),
        (["--think-end", ""], "--think-end must not be empty; got ''"),
        (["--drain-s", "-1"], "--drain-s must be a number of seconds, at least 0; got -1.0"),
    ],
)
def test_bad_flags(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GOOD, *flags]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", ["http://relay.example", "relay.example:8000", "*.example", "a/b", ""])
def test_a_name_that_no_host_header_can_have_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*GOOD, "--allow-host", name])
    assert f"must be one host name or address, without scheme, port or *; got {name!r}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "host"), [("Relay.Example.", "relay.example"), ("::1", "::1"), ("[FD00::1]", "fd00::1")]
)
def test_a_name_counts_in_lower_case_without_brackets(name: str, host: str) -> None:
    assert parser().parse_args([*GOOD, "--allow-host", name]).allow_host == [host]
