"""The walks of a report and of a policy, which the theory of operation draws, name files and functions that exist."""

from __future__ import annotations

import re

from tests.processes import ROOT

PAGE = (ROOT / "meridian_agent" / "link" / "theory_of_operation.md").read_text()
WALKS = PAGE.partition("## The walk of a report\n")[2].partition("## Two threads\n")[0]
# The end of a file's path, and the functions that are named beside it.
STEPS = re.findall(r"`((?:\w+/)*\w+\.py)`(?:: ((?:`\w+`(?:, | and |, or )?)+))?", WALKS)
FILES = [path for package in ("meridian_agent", "meridian_control") for path in (ROOT / package).rglob("*.py")]


def test_both_walks_are_read() -> None:
    assert len(STEPS) > 40


def test_every_step_of_a_walk_exists() -> None:
    for path, functions in STEPS:
        (file,) = [file for file in FILES if str(file).endswith(f"/{path}")]
        source = file.read_text()
        missing = [name for name in re.findall(r"\w+(?=`)", functions) if not re.search(rf"\bdef {name}\(", source)]
        assert missing == [], path
