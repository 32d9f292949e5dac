"""The agent's environment variables, and the engine's name and rank that follow from them."""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from meridian.v1 import agent_pb2

from meridian_agent.link import environment, identity
from meridian_agent.link.credentials import AgentCredentials
from meridian_agent.link.identity import identity_of_engine, is_address, rank_of, targets, wanted_name
from meridian_agent.link.settings_file import state_folder
from meridian_agent.vllm_adapter import version


def frozen() -> bool:
    return environment.is_true("MERIDIAN_FREEZE", True, "the engine is frozen")


# What the agent reads from each variable; a value that cannot be used, with the value's part that the log shows; and
# what the agent goes on with.
VARIABLES: dict[str, tuple[Callable[[], Any], str, str, Any]] = {
    "MERIDIAN_CONTROL": (targets, "a:1, http://b:2", "http://b:2", ["a:1"]),
    "MERIDIAN_ENGINE_ID": (lambda: wanted_name()[0], "a\nb", r"a\nb", "the-host"),
    "MERIDIAN_LABELS": (
        lambda: identity_of_engine("0", "e")["labels"],
        "pool=a,gpu:h100",
        "gpu:h100",
        {"pool": "a"},
    ),
    "MERIDIAN_URL": (lambda: identity_of_engine("0", "e")["url"], "10.0.0.7:8000", "10.0.0.7:8000", ""),
    "MERIDIAN_FREEZE": (frozen, "n", "n", True),
    "MERIDIAN_PROXY": (lambda: AgentCredentials.from_environment().proxy, "proxy:3128", "proxy:3128", ""),
    "MERIDIAN_TLS_CA": (lambda: AgentCredentials.from_environment().ca, "", "", ""),
    "MERIDIAN_TLS_CERT": (lambda: AgentCredentials.from_environment().cert, "", "", ""),
    "MERIDIAN_TLS_KEY": (lambda: AgentCredentials.from_environment().key, "", "", ""),
    "MERIDIAN_TOKEN_FILE": (lambda: AgentCredentials.from_environment().token_file, "", "", ""),
    "MERIDIAN_STATE_DIR": (state_folder, "", "", None),
}


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (*VARIABLES, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(platform, "node", lambda: "the-host")
    monkeypatch.setattr(identity, "NAMESPACE", tmp_path / "none")


@pytest.mark.parametrize("name", VARIABLES)
@pytest.mark.parametrize("empty", ["", "  ", "\n"])
def test_an_empty_variable_is_unset(
    name: str, empty: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read = VARIABLES[name][0]
    unset = read()
    monkeypatch.setenv(name, empty)
    assert read() == unset
    assert not caplog.records


@pytest.mark.parametrize("name", [name for name, row in VARIABLES.items() if row[1]])
def test_a_value_that_cannot_be_used_is_one_line(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read, bad, shown, goes_on_with = VARIABLES[name]
    monkeypatch.setenv(name, bad)
    assert read() == goes_on_with
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.getMessage().startswith(f"meridian: {name}='{shown}': ")
    assert "\n" not in record.getMessage()


@pytest.mark.parametrize(
    ("name", "bad", "shown"),
    [
        ("MERIDIAN_PROXY", "https://user:s3cret@proxy:3128", "https://***@proxy:3128"),
        ("MERIDIAN_PROXY", "http://user:s3@cret@proxy", "http://***@proxy"),
        ("MERIDIAN_PROXY", "user:s3cret@proxy:3128", "***@proxy:3128"),
        ("MERIDIAN_PROXY", f"user:s3cret{' ' * 1000}@proxy:3128", "***@proxy:3128"),
        ("MERIDIAN_CONTROL", "dns+x://user:s3cret@a:1", "dns+x://***@a:1"),
        ("MERIDIAN_URL", f"user:s3cret{'x' * 1000}@a:1", "***@a:1"),
    ],
)
def test_no_password_is_logged(
    name: str, bad: str, shown: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(name, bad)
    VARIABLES[name][0]()
    (record,) = caplog.records
    assert record.getMessage().startswith(f"meridian: {name}='{shown}': ")


@pytest.mark.parametrize(
    ("said", "expected"),
    [*((word, True) for word in ("1", "true", "YES", "On")), *((word, False) for word in ("0", "false", "No", "OFF"))],
)
def test_a_boolean(said: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MERIDIAN_FREEZE", said)
    assert frozen() is expected


ADDRESSES = ["h:1", "10.0.0.7:50051", "[::1]:50051", "unix:/run/m", "dns:///h:1", "ipv4:1.2.3.4:5"]
OTHERS = ["h", "h:", ":1", "h:0", "h:65536", "::1:5", "http://h:1", "a b:1", "h:x", "u@h:1", "\udcff:1", "unix:/a\nb"]


@pytest.mark.parametrize("said", [*ADDRESSES, *OTHERS])
def test_an_address(said: str) -> None:
    assert is_address(said) == (said in ADDRESSES)


@pytest.mark.parametrize("missing", ["MERIDIAN_TLS_CA", "MERIDIAN_TLS_CERT", "MERIDIAN_TLS_KEY"])
def test_a_file_that_cannot_be_read_is_named_with_its_variable(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MERIDIAN_TLS_CA", "MERIDIAN_TLS_CERT", "MERIDIAN_TLS_KEY"):
        (tmp_path / name).write_text("")
        monkeypatch.setenv(name, str(tmp_path / name))
    (tmp_path / missing).unlink()
    with pytest.raises(ValueError, match=f"^{missing}='.*': No such file or directory$"):
        AgentCredentials.from_environment().open("127.0.0.1:1", ())


@pytest.mark.parametrize("named", [None, "pod-7"])
def test_engines_that_are_started_as_one_have_a_name_each(named: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each engine needs a name of its own, because the control plane ends an engine's stream when another one connects
    with the same name."""
    if named is not None:
        monkeypatch.setenv("MERIDIAN_ENGINE_ID", named)
    name = named or "the-host"
    assert [wanted_name(rank) for rank in (0, 1)] == [(name, bool(named)), (f"{name}-dp1", bool(named))]


def test_bytes_that_are_no_text_fit_into_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MERIDIAN_ENGINE_ID", "MERIDIAN_LABELS"):
        monkeypatch.setenv(name, "pool=\udcff")
    told = agent_pb2.Hello(**identity_of_engine("0.32.0", wanted_name()[0]))
    assert (told.engine_id, dict(told.labels)) == ("pool=\\udcff", {"pool": "\\udcff"})


@pytest.mark.parametrize(
    ("said", "url"),
    [
        (f"http://{'a' * 2000}:8000/", f"http://{'a' * 2000}:8000"),
        (f"http://{'a' * 2048}:8000", ""),
        ("http://a:8000\x07", ""),
        ("http://a\u202eb:8000", ""),
        ("http://\udcff:8000", ""),
        ("http://a b:8000", ""),
        ("ftp://a", ""),
    ],
)
def test_a_url_is_used_as_it_is_or_not_at_all(said: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MERIDIAN_URL", said)
    assert identity_of_engine("0.32.0", "e")["url"] == url


def test_the_last_of_two_values_of_a_label_counts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MERIDIAN_LABELS", "pool=a, gpu=h100 ,pool=b,")
    assert identity_of_engine("0", "e")["labels"] == {"pool": "b", "gpu": "h100"}
    (record,) = caplog.records
    assert "MERIDIAN_LABELS='pool=b'" in record.getMessage()


@pytest.mark.parametrize("named", ["dev", "", "0", "x.y", "0.x"])
def test_a_vllm_without_a_version_is_unfit(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "vllm_version", lambda: named)
    assert version.unfit().startswith(f"vLLM {named} is outside the supported ")


@pytest.mark.parametrize(("named", "numbers"), [("0.32.1+cpu", (0, 32)), ("0.33", (0, 33)), ("1.0.0rc1", (1, 0))])
def test_the_numbers_of_a_version(named: str, numbers: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "vllm_version", lambda: named)
    assert version.minor() == numbers


@pytest.mark.parametrize(
    ("config", "rank"),
    [
        ({"data_parallel_rank": 0, "data_parallel_index": 0}, 0),
        ({"data_parallel_rank": 2, "data_parallel_index": 2}, 2),
        # vLLM treats the data-parallel ranks of a dense model as separate engines.
        ({"data_parallel_rank": 0, "data_parallel_index": 2}, 2),
        ({"data_parallel_rank": 2}, 2),
        ({}, 0),
    ],
)
def test_which_of_them_it_is(config: dict[str, Any], rank: int) -> None:
    assert rank_of(SimpleNamespace(**config)) == rank
