"""The rigs of the benchmarks: the gate, the loads, the simulated fleet, and rivals that must compute the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from meridian_kernels import reference

from tests.bench import cost_control
from tests.bench.cost_control import ECHO, OLD, TODAY, Load, Servers
from tests.bench.fleet_rig import Rig, Windows, measure
from tests.bench.fleet_tape import made
from tests.bench.gate import GATE, Keeper
from tests.bench.kernels import why_not
from tests.needed import TRITON, VLLM
from tests.processes import ROOT, wait_for

if TYPE_CHECKING:
    import torch

    from tests.postgres import Postgres

# Stands in for a worker whose steps need the process of the argument.
WORKER = """
import sys
from tests.bench.gate import Gate
from tests.bench.test_rigs import state
from tests.processes import wait_for
gate = Gate()
while True:
    gate.step()
    wait_for(lambda: state(int(sys.argv[1])) != "T", 2, "the other process to go on")
    gate.tokens += 2
    gate.prompt_tokens += 3
    gate.done()
"""


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


async def test_a_gate_lets_steps_pass_and_stops_the_other_processes_between_windows(tmp_path: Path) -> None:
    keeper, other = Keeper(tmp_path / "gate"), subprocess.Popen(["sleep", "600"])
    environment = os.environ | {GATE: str(tmp_path / "gate")}
    worker = subprocess.Popen([sys.executable, "-c", WORKER, str(other.pid)], env=environment, cwd=ROOT)
    try:
        await keeper.reached()
        for count in (3, 1):
            passed = await keeper.opened(count, [other.pid])
            assert (passed.tokens, passed.prompt_tokens) == (2 * count, 3 * count)
            assert 0 < passed.between_s < passed.took_s
            assert 0 <= passed.starved_s < passed.took_s
            assert 0 < passed.computing_s < passed.took_s
            wait_for(lambda: state(other.pid) == "T", 5, "the other process to stop")
        keeper.leave_open([other.pid])
        wait_for(lambda: state(other.pid) == "S", 5, "the other process to go on")
    finally:
        for process in (worker, other):
            process.kill()
            process.wait()
        keeper.close()


def test_an_older_commit_is_found_or_its_absence_said(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    (repository / "tests" / "bench").mkdir(parents=True)
    (repository / "tests" / "bench" / "size.py").touch()
    git = ("git", "-C", str(repository), "-c", "user.name=test", "-c", "user.email=test@example.org")
    for command in (("init", "-q"), ("add", "."), ("commit", "-qm", "Add a file")):
        subprocess.run([*git, *command], check=True)
    assert cost_control.tree_of("HEAD", tmp_path / "head", repository) == ""
    assert (tmp_path / "head" / "tests" / "bench" / "size.py").exists()
    assert "no commit 8206ef5" in cost_control.tree_of("8206ef5", tmp_path / "missing", repository)


async def test_every_server_gets_the_same_reports(tmp_path: Path) -> None:
    servers = Servers(tmp_path / "servers", Load(engines=2, begin_s=0.5, measure_s=1.5), "HEAD")
    assert servers.arms == [TODAY, OLD, ECHO]
    for arm in servers.arms:
        found = await servers.window(arm)
        assert found["messages_per_s"] > 0
        assert found["engines_per_core"] > 0
        assert ("latency_p50_ms" in found) == (arm != ECHO)


async def test_a_small_fleet_loses_nothing_although_a_replica_is_killed(tmp_path: Path, postgres: Postgres) -> None:
    tape = made(1, 4, 20.0, 600, 1000)
    rig = Rig(6, 2, [], Windows(slower=2.0, seconds=0.5, idle_s=0.1), [tape])
    found = await measure(rig, tmp_path, postgres)
    assert found["lost"] == 0
    assert found["moved"] == 3
    assert found["reports_s"] > 0
    assert found["cut"] > 0


@pytest.mark.filterwarnings("ignore")
def test_never_hit_blocks_are_reused_first() -> None:
    """Unhashed blocks are reused first, then blocks never hit, then blocks that were; least recently used first in
    each."""
    VLLM.require()
    from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

    from tests.bench.cache_never_hit import TwoClassQueue

    blocks = [KVCacheBlock(i) for i in range(6)]
    queue = TwoClassQueue(FreeKVCacheBlockQueue(blocks))
    assert queue.popleft_n(6) == blocks
    queue.were_hit |= {0, 3}
    queue.append_n([blocks[0], blocks[1]])
    queue.append_n([blocks[2], blocks[3], blocks[4]])
    queue.prepend_n([blocks[5]])
    queue.remove(blocks[2])
    assert queue.num_free_blocks == 5
    assert [b.block_id for b in queue.popleft_n(3)] == [5, 1, 4]
    assert [b.block_id for b in queue.popleft_n(2)] == [0, 3]
    assert not queue.were_hit
    queue.append_n([blocks[0]])
    assert queue.popleft_n(1) == [blocks[0]]


def columns(logits: torch.Tensor, end: int) -> np.ndarray:
    want = reference(logits.double().numpy(), [end])
    floats = (want.entropy_nats, want.log_sum_exp_nats, want.top_logprob_nats, want.end_logprob_nats)
    return np.stack([*floats, want.top_token_id.astype(np.float32), want.end_rank.astype(np.float32)])


INTERPRETER = Path(__file__).parents[1] / "engine" / "interpreter"
INTERPRETED = """
import numpy as np, torch
from tests.bench.kernels_triton import TritonProbe
from tests.bench.test_rigs import columns
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
