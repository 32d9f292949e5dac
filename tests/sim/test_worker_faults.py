"""An exception at any line that the agent runs in a worker: the worker samples the same tokens as without the agent.

The worker also logs the fault, and measures again after its rest.
"""

from __future__ import annotations

import pytest

from tests.needed import VLLM

pytest.importorskip("vllm", reason=VLLM.reason)

from tests.sim.worker import broken, cases

pytestmark = pytest.mark.filterwarnings("ignore")


# One fault in this many is tested; `python -m tests.sim --lines` takes all of them.
SAMPLED = 11


def test_a_fault_at_any_line_of_the_worker() -> None:
    found = cases()
    assert len({case.fault.line for case in found}) > 90, "lines are not reached any more"
    assert [said for case in found[::SAMPLED] if (said := broken(case))] == []
