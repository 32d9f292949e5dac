"""The identity of an engine: its name and its data-parallel rank."""

from __future__ import annotations

import platform
from types import SimpleNamespace
from typing import Any

import pytest
from meridian.v1 import agent_pb2

from meridian_agent.link.identity import identity_of_engine, rank_of
from meridian_agent.vllm_adapter import version


@pytest.mark.parametrize("named", [None, "pod-7"])
def test_engines_that_are_started_as_one_have_a_name_each(named: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each engine needs a name of its own, because the control plane ends an engine's stream when another one connects
    with the same name."""
    monkeypatch.setattr(version, "vllm_version", lambda: "0.32.0")
    monkeypatch.delenv("MERIDIAN_ENGINE_ID", raising=False)
    if named is not None:
        monkeypatch.setenv("MERIDIAN_ENGINE_ID", named)
    name = named or platform.node()
    assert [identity_of_engine("0.32.0", rank)["engine_id"] for rank in (0, 1)] == [name, f"{name}-dp1"]


def test_bytes_that_are_no_text_fit_into_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MERIDIAN_ENGINE_ID", "MERIDIAN_LABELS", "MERIDIAN_URL"):
        monkeypatch.setenv(name, "pool=\udcff")
    told = agent_pb2.Hello(**identity_of_engine("0.32.0"))
    assert (told.engine_id, dict(told.labels), told.url) == ("pool=\\udcff", {"pool": "\\udcff"}, "pool=\\udcff")


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
