"""The markers of every reasoning parser that vLLM has, found by the code that an engine runs (`tests/parsers.py`)."""

from __future__ import annotations

from typing import Any

import pytest

from tests import parsers

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def table() -> dict[str, Any]:
    return parsers.table()


def test_every_parser_is_resolved_and_vllm_agrees(table: dict[str, Any]) -> None:
    summary = parsers.summary(table)
    assert summary["registered"] > 0
    assert summary["resolved"] == summary["registered"], summary["named"]
    assert all(told["vllm_agrees_by"] for told in table["parsers"].values())


def test_the_kept_table_is_that_of_the_installed_vllm(table: dict[str, Any]) -> None:
    (kept,) = [one for one in parsers.saved() if one["vllm"] == table["vllm"]]
    assert kept == table, "run python -m tests.parsers --save"


def test_the_readme_says_what_the_tables_say() -> None:
    assert parsers.written() == parsers.section(parsers.saved())
