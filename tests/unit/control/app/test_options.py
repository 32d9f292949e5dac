"""The notice of `meridian-control` on who may do what, for each set of flags; `contract/test_open_access` tests what
callers then may do."""

from __future__ import annotations

import pytest

from meridian_control.app.flags import access_notice, everybody_may_change, listener, page_links, parser

OPEN = "Changes are accepted from this host only"
ALL = "may change everything (--insecure)"


@pytest.mark.parametrize("listen", [":50051", "0.0.0.0:50051", "[::]:50051", "10.0.0.7:50051", "example.com:50051"])
@pytest.mark.parametrize(
    ("flags", "notice", "everybody"),
    [
        ("", OPEN, False),
        # TLS alone asks no caller who it is.
        ("--tls-cert x --tls-key y", OPEN, False),
        ("--insecure", ALL, True),
        ("--tls-cert x --tls-key y --insecure", ALL, True),
        ("--tls-cert x --tls-key y --client-ca z", "", True),
        ("--tls-cert x --tls-key y --access a", "", False),
        ("--tls-cert x --tls-key y --client-ca z --access a", "", True),
    ],
)
def test_addresses_that_others_reach(listen: str, flags: str, notice: str, everybody: bool) -> None:
    args = parser().parse_args(["--listen", listen, *flags.split()])
    said = access_notice(args)
    assert notice in said if notice else not said
    assert not said or f"reaches {listen} " in said
    assert everybody_may_change(args) is everybody


@pytest.mark.parametrize("listen", ["127.0.0.1:50051", "localhost:50051", "[::1]:50051", "unix:/run/meridian"])
def test_addresses_that_nobody_else_reaches(listen: str) -> None:
    args = parser().parse_args(["--listen", listen])
    assert access_notice(args) == ""
    assert listener(args) == (listen, None)


@pytest.mark.parametrize(("listen", "bound"), [(":1", "[::]:1"), ("0.0.0.0:1", "0.0.0.0:1"), ("[::1]:1", "[::1]:1")])
def test_every_address_can_be_listened_on_without_a_flag(listen: str, bound: str) -> None:
    assert listener(parser().parse_args(["--listen", listen]))[0] == bound


@pytest.mark.parametrize("flags", [["--otlp-metrics-endpoint", "c:4317"], ["--otlp-metrics-interval=5"]])
def test_removed_flags_name_what_to_use_instead(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(flags)
    assert "is gone: let the OpenTelemetry collector scrape /metrics" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "refused", "must", "taken"),
    [
        ("trace-ratio", ("nan", "2", "-0.1", "all"), "from 0 to 1", (0, 1)),
        ("heartbeat", ("nan", "0.05", "-1", "inf", "no"), "0, or from 0.1 to 3600 seconds", (0, 0.1, 3600)),
        *(
            (flag, ("0", "-1", "1.5", "all"), "a whole number, at least 1", (1, 2**40))
            for flag in ("max-engines", "max-engines-per-caller", "max-stream-mib", "max-caller-mib", "max-engines-mib")
        ),
    ],
)
def test_numbers_have_limits(
    flag: str, refused: tuple[str, ...], must: str, taken: tuple[float, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    for text in refused:
        with pytest.raises(SystemExit):
            parser().parse_args([f"--{flag}={text}"])
        assert f"--{flag}: must be {must}; got '{text}'" in capsys.readouterr().err
    for value in taken:
        assert vars(parser().parse_args([f"--{flag}={value}"]))[flag.replace("-", "_")] == value


def test_links_on_the_page_have_names() -> None:
    flags = ["--page-link", "Grafana=https://grafana.example/d/x?a=1", "--page-link=Our guide = http://[::1]:8080/a"]
    links = {"Grafana": "https://grafana.example/d/x?a=1", "Our guide": "http://[::1]:8080/a"}
    assert page_links(parser().parse_args(flags)) == links
    assert page_links(parser().parse_args([])) == {}
    twice = parser().parse_args(["--page-link", "a=http://b", "--page-link", "a=http://c"])
    with pytest.raises(ValueError, match="--page-link a=… is given 2 times"):
        page_links(twice)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("https://grafana.example", "must be NAME=URL with a name of at most 40 characters; got"),
        ("=https://grafana.example", "must be NAME=URL"),
        ("x" * 41 + "=https://grafana.example", "must be NAME=URL"),
        ("a\u202eb=https://grafana.example", "must be NAME=URL"),
        ("Grafana=", "the URL of Grafana must be http://HOST… or https://HOST…; got ''"),
        ("Grafana=grafana.example", "got 'grafana.example'"),
        ("Grafana=javascript:alert(1)", "got 'javascript:alert(1)'"),
        ("Grafana=https:///d/x", "got 'https:///d/x'"),
        ("Grafana=https://a b/", "got 'https://a b/'"),
        ("Grafana=https://a:x/", "got 'https://a:x/'"),
        ("Grafana=https://[a/", "got 'https://[a/'"),
        ("Grafana=https://me:secret@grafana.example/", "must have no user and no password"),
    ],
)
def test_a_link_that_cannot_be_followed_is_named(text: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["--page-link", text])
    told = capsys.readouterr().err
    assert "argument --page-link: " in told
    assert complaint in told
    assert "secret" not in told
