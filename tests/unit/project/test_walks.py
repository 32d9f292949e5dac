"""The walks of a report and of a policy, which the theory of operation draws, name files and functions that exist."""

from __future__ import annotations

import re

import pytest

from tests.processes import ROOT

PAGE = (ROOT / "meridian_agent" / "link" / "theory_of_operation.md").read_text()
WALKS = PAGE.partition("## The walk of a report\n")[2].partition("## Two threads\n")[0]
# A file, and the functions that are named beside it.
STEPS = re.findall(r"`(\w+(?:/\w+)+\.py)`(?:: ((?:`\w+`(?:, | and |, or )?)+))?", WALKS)


def test_both_walks_are_read() -> None:
    assert len(STEPS) > 50


@pytest.mark.parametrize(("path", "functions"), sorted(set(STEPS)))
def test_a_step_of_a_walk_exists(path: str, functions: str) -> None:
    sources = [
        (ROOT / package / path).read_text()
        for package in ("meridian_agent", "meridian_control")
        if (ROOT / package / path).exists()
    ]
    assert len(sources) == 1
    missing = [name for name in re.findall(r"\w+(?=`)", functions) if not re.search(rf"\bdef {name}\(", sources[0])]
    assert missing == []
