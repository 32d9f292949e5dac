"""Which names and which pages an HTTP listener answers to."""

from __future__ import annotations

import pytest

from meridian_control.app import flags
from meridian_control.common.http_listener import Hosts

OWN = ["localhost", "localhost:9465", "LOCALHOST.", "127.0.0.1:9465", "127.8.8.8", "[::1]:9465", "[::ffff:127.0.0.1]"]
FOREIGN = ["evil.example", "evil.example:9465", "localhost.evil.example", "127.0.0.1.evil.example:9465", "xlocalhost"]
ADDRESSES = ["10.0.0.7:9465", "192.168.1.2", "[fd00::3]:9465", "0.0.0.0"]
MALFORMED = ["", ":9465", "evil.example@localhost", "localhost@evil.example", "localhost/evil", "a b", "[::1", "::1"]


@pytest.mark.parametrize("listen", ["127.0.0.1", "::1", "localhost", "127.0.0.2"])
def test_on_loopback_only_names_of_loopback(listen: str) -> None:
    hosts = Hosts(listen)
    assert [host for host in (*OWN, *FOREIGN, *ADDRESSES, *MALFORMED) if hosts.allows(host)] == OWN


def test_the_operator_names_others() -> None:
    hosts = Hosts("127.0.0.1", ["Page.Example"])
    assert hosts.allows("page.example")
    assert hosts.allows("page.example:443")
    assert hosts.allows("localhost")
    assert not [host for host in (*FOREIGN, "a.page.example", "page.example.evil") if hosts.allows(host)]


@pytest.mark.parametrize("said", ["fd00::3", "[FD00::3]", "Page.Example.", " page.example "])
def test_a_name_may_be_spelled_in_ways(said: str) -> None:
    hosts = Hosts("127.0.0.1", [said])
    assert hosts.allows("[fd00::3]:9465") or hosts.allows("page.example:9465")


@pytest.mark.parametrize("said", ["page.example:9465", "https://page.example", "*.example", "[fd00::3]:80", "", "a b"])
def test_a_name_that_no_request_has_is_refused(said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        flags.parser().parse_args(["--allow-host", said])
    assert ended.value.code == 2
    assert f"--allow-host: must be one host name or address, without scheme, port or *; got {said!r}" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("listen", ["", "0.0.0.0", "::", "10.0.0.7", "page.example"])
def test_elsewhere_every_name_unless_some_are_given(listen: str) -> None:
    assert all(map(Hosts(listen).allows, (*OWN, *FOREIGN, *ADDRESSES)))
    assert not any(map(Hosts(listen).allows, MALFORMED))
    named = Hosts(listen, ["page.example"])
    asked = (*OWN, *FOREIGN, *ADDRESSES, "page.example:9465")
    assert [host for host in asked if named.allows(host)] == [*OWN, *ADDRESSES, "page.example:9465"]


@pytest.mark.parametrize(
    ("origin", "host", "allowed"),
    [
        ("http://localhost:9465", "localhost:9465", True),
        ("https://page.example", "127.0.0.1:9465", True),
        ("http://localhost:3000", "localhost:9465", False),
        ("http://evil.example:9465", "localhost:9465", False),
        ("null", "localhost:9465", False),
        ("", "localhost:9465", False),
        ("ftp://localhost:9465", "localhost:9465", False),
    ],
)
def test_only_own_pages_may_read(origin: str, host: str, allowed: bool) -> None:
    assert Hosts("127.0.0.1", ["page.example"]).allows_origin(origin, host) is allowed
