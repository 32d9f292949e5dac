"""The kernel benchmark's arithmetic and rivals, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from meridian_kernels import reference

from tests.bench.kernels import why_not
from tests.bench.kernels_arms import ALONE, EAGER, OURS, eager
from tests.bench.kernels_report import Case, Found, Times, markdown
from tests.needed import TRITON


def case(rows: int, ours_us: float, eager_us: float, other_us: float) -> Case:
    times = {OURS: ours_us, ALONE: ours_us / 2, EAGER: eager_us, "Triton": other_us}
    return Case("float32", 1000, rows, 4000 * rows, {n: Times(t, t, t) for n, t in times.items()}, 20.0, {OURS: 1e-6})


def test_shares_ratios_and_aims() -> None:
    """512,000 bytes in 2 us are 256 GB/s."""
    good, slow, few = case(128, 2.0, 10.0, 3.0), case(256, 8.0, 20.0, 4.0), case(1, 9.0, 9.0, 1.0)
    assert good.share(OURS, 256e9) == pytest.approx(1.0)
    assert good.share(ALONE, 256e9) == pytest.approx(2.0)
    assert (good.faster(EAGER), good.best_other()) == (5.0, "Triton")
    found = Found("GPU", "1.2", {"torch": "9"}, "abc", 256e9, [good, slow, few], {"vLLM": "none"})
    assert list(found.aims().values()) == ["1 of 2", "1 of 2", "1 of 2"]
    text = markdown(found)
    assert "| 1000 | 128 | 256 | 100% | 200% | 5.0 | 1.50 (Triton) | 20 | 2.0 | 1.0 | 10.0 | 3.0 |" in text
    assert "Not run: vLLM (none)." in text
    assert json.loads(json.dumps(found.plain()))["cases"][0]["times"][OURS]["median_us"] == 2.0


def test_times() -> None:
    assert Times.of([float(n) for n in range(101)]) == Times(50.0, 10.0, 90.0)


def columns(logits: torch.Tensor, end: int) -> np.ndarray:
    want = reference(logits.double().numpy(), [end])
    floats = (want.entropy_nats, want.log_sum_exp_nats, want.top_logprob_nats, want.end_logprob_nats)
    return np.stack([*floats, want.top_token_id.astype(np.float32), want.end_rank.astype(np.float32)])


def test_eager_is_the_same_function() -> None:
    logits = 4 * torch.randn(5, 3000)
    logits[1, 7:2000] = -torch.inf
    np.testing.assert_allclose(eager(logits, 3).numpy(), columns(logits, 3), rtol=1e-6, atol=1e-4)


INTERPRETER = Path(__file__).parents[1] / "engine" / "interpreter"
INTERPRETED = """
import numpy as np, torch
from tests.bench.kernels_triton import TritonProbe
from tests.bench.test_kernels import columns
torch.manual_seed(0)
for rows, vocab, programs in ((3, 1000, 1), (2, 3001, 6), (1, 5, 64)):
    for dtype in (torch.float32, torch.float16):
        logits = (4 * torch.randn(rows, vocab)).to(dtype)
        logits[0, 2:4] = -torch.inf
        got = TritonProbe(rows, vocab, torch.device("cpu"), programs, block=256)(logits, vocab // 3)
        np.testing.assert_allclose(got.numpy(), columns(logits, vocab // 3), rtol=1e-5, atol=1e-4)
"""


def test_the_triton_rival_is_the_same_function() -> None:
    """The Triton rival computes the same columns, checked in Triton's interpreter."""
    TRITON.require()
    paths = [str(INTERPRETER), *sys.path]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, check=True, timeout=120)


@pytest.mark.skipif(not why_not(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    done = subprocess.run([sys.executable, "-m", "tests.bench.kernels"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, f"nothing measured: {why_not()}\n")
