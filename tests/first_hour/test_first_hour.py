"""The guide's commands, run in their order on a real engine: `make test-first-hour`."""

from __future__ import annotations

import pytest

from tests.first_hour.__main__ import blocks, run
from tests.processes import free_port

# What each heading's commands print, in the order of the guide.
PRINTS = (
    "",
    "",
    "",
    "thinking ended: natural",
    "first rule to fire",
    "a.trace: ",
    "within the allowed 10.0",
    "running",
    "meridian_engines 1.0",
    "as at first",
    "",
)


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_every_command_of_the_guide_runs() -> None:
    ports = {port: free_port() for port in ("50051", "9464", "9465", "8000")}
    outputs = run(ports)
    assert len(outputs) == len(PRINTS) == len(blocks())
    for output, words in zip(outputs, PRINTS, strict=True):
        assert words in output
