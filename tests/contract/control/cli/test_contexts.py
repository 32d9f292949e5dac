"""Where meridianctl takes its address and credentials from."""

from pathlib import Path

import pytest

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
