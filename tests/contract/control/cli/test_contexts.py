"""Where meridianctl takes its address and credentials from."""

from pathlib import Path

import pytest

from meridian_control.cli.console import Target
from meridian_control.common.client_credentials import ClientCredentials
from tests.contract.ctl import INVALID, OK, UNREACHABLE, Control, run


@pytest.fixture
def contexts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "contexts.toml"
    monkeypatch.setenv("MERIDIAN_CONTEXTS", str(path))
    monkeypatch.delenv("MERIDIAN_CONTEXT", raising=False)
    return path


async def test_where_the_address_comes_from(
    control: Control, file: Path, contexts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command line goes before the environment, the environment before the file, and an address before a context's
    name."""
    nowhere = "127.0.0.1:1"
    contexts.write_text(
        f'current = "here"\n[contexts.here]\nserver = "{control.address}"\n[contexts.gone]\nserver = "{nowhere}"'
    )
    await control("policy", "apply", "-f", file)

    async def reached(*options: object, server: str = "") -> bool:
        result = await run(*options, "policy", "get", server=server)
        assert result.exit_code in (OK, UNREACHABLE)
        return result.exit_code == OK

    assert await reached()
    assert not await reached(server=nowhere)
    assert await reached("--context", "here", server=nowhere)
    assert await reached("--server", control.address, "--context", "gone", server=nowhere)
    assert not await reached("--context", "gone")
    monkeypatch.setenv("MERIDIAN_CONTEXT", "gone")
    assert not await reached()
    assert await reached(server=control.address)
    assert await reached("--context", "here")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('current = "a"', 'has no context "a"; known contexts: none'),
        (
            'current = "a"\n[contexts.c]\nserver = ""\n[contexts.b]\nserver = ""',
            'has no context "a"; known contexts: b, c',
        ),
        ("[contexts.a]\nhost = 1", "contexts.a.server: Field required"),
        ("[contexts.a", "Expected ']' at the end of a table declaration (at end of document)"),
    ],
)
async def test_a_context_file_that_cannot_be_used(contexts: Path, text: str, complaint: str) -> None:
    contexts.write_text(text)
    result = await run("engines", server="")
    assert (result.exit_code, result.stderr) == (INVALID, f"{contexts}: {complaint}\n")
    assert (await run("--server", "127.0.0.1:1", "engines", server="")).exit_code == UNREACHABLE


async def test_a_context_is_chosen_and_nothing_else_changes(contexts: Path) -> None:
    rest = '\n[contexts.a]\nserver = "a:1" # ours\n[contexts."b c"]\nserver = "b"\ntoken_file = "current = 1"\n'
    for before, after in (('# first\ncurrent = "a"\n', '# first\ncurrent = "b c"\n'), ("", 'current = "b c"\n\n')):
        contexts.write_text(before + rest)
        chosen = await run("context", "use", "b c", server="")
        assert (chosen.exit_code, chosen.stdout) == (OK, f"{contexts}: the current context is b c\n")
        assert contexts.read_text() == after + rest
    listed = [line.split() for line in (await run("context", "list", server="")).stdout.splitlines()]
    assert listed[1:] == [["a", "a:1"], ["b", "c", "*", "b", "token_file"]]
    unknown = await run("context", "use", "d", server="")
    assert (unknown.exit_code, unknown.stderr) == (
        INVALID,
        f'{contexts}: has no context "d"; known contexts: a, b c\n',
    )


async def test_choosing_a_context_keeps_links_modes_and_line_ends(contexts: Path) -> None:
    file = contexts.with_name("shared.toml")
    contexts.symlink_to(file)
    rest = b'[contexts.a]\r\nserver = "a"\r\n[contexts.b]\r\nserver = "b"\r\n'
    for before, after in ((b'current = "a"\r\n', b'current = "b"\r\n'), (b"", b'current = "b"\r\n\r\n')):
        file.write_bytes(before + rest)
        file.chmod(0o600)
        assert (await run("context", "use", "b", server="")).exit_code == OK
        assert (contexts.is_symlink(), file.stat().st_mode & 0o777) == (True, 0o600)
        assert file.read_bytes() == after + rest


async def test_no_contexts(contexts: Path) -> None:
    assert (await run("context", "list", server="")).stdout == f"no context is defined in {contexts}\n"


@pytest.mark.parametrize(
    ("server", "used"),
    [("localhost", "localhost:50051"), ("[::1]", "[::1]:50051"), ("a.b:7", "a.b:7"), ("dns:x", "dns:x")],
)
def test_an_address_without_a_port_has_the_default_port(server: str, used: str) -> None:
    assert Target(server, "", ClientCredentials()).resolve()[0] == used


@pytest.mark.parametrize(
    ("server", "hint"),
    [
        ("http://a:7/", "; write a:7"),
        ("https://a:7", "; write a:7, and --ca for TLS"),
        ("http://a", ""),
        ("a:99999", ""),
        ("::1", ""),
    ],
)
async def test_an_address_that_cannot_be_used(server: str, hint: str) -> None:
    result = await run("--server", server, "engines", server="")
    assert (result.exit_code, result.stderr) == (
        INVALID,
        f"--server must be an address host:port{hint}; got '{server}'\n",
    )
