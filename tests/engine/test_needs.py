"""The table of the vLLM names that the agent needs, checked in vLLM's sources and the imported vLLM, whole and
altered."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from meridian_agent.engine.start_facts import OPTIONAL
from meridian_agent.vllm_adapter import required_api, version
from meridian_agent.vllm_adapter.required_api import (
    API_SERVER,
    BALANCER,
    BUDGET,
    CONNECTOR,
    ENGINE,
    FRONT_END,
    LIMITS,
    METRICS,
    PREMATURE_STOPS,
    V1_RUNNER,
    V2_RUNNER,
    Imported,
    missing,
)
from tests.processes import ENGINE_ENV, Control, Process, wait_for
from tests.vllm_sources import Sources, tables

ALL = {**CONNECTOR, **V1_RUNNER, **V2_RUNNER, **API_SERVER, **FRONT_END, **BALANCER, **ENGINE}
PARAMS = "vllm.sampling_params:SamplingParams"
ALL |= {owner: ALL.get(owner, ()) + wanted for owner, wanted in METRICS.items()}
ALL[PARAMS] += BUDGET[PARAMS]


class Maimed(Sources):
    """The sources after a change."""

    def __init__(self, change: Callable[[str], str]) -> None:
        super().__init__(installed())
        self._change = change

    def _read(self, path: str) -> str:
        return self._change(super()._read(path))


def installed() -> Path:
    import vllm

    return Path(vllm.__file__).parents[1]


def test_both_ways_to_look_find_everything() -> None:
    sources = Sources(installed())
    assert sources.version() == version.vllm_version().split("+")[0]
    assert missing(sources, ALL) == []
    assert missing(Imported(), ALL) == []
    for table in tables(version.vllm_version()):
        assert missing(sources, table) == missing(Imported(), table) == []
    # The limits have tables of their own, and fastapi is no part of vLLM.
    known = {name: table for name, table in vars(required_api).items() if isinstance(table, dict) and name.isupper()}
    assert [name for name in known.keys() - {"LIMITS", "HTTP"} if known[name] not in tables("0.32.0")] == []
    assert version.unfit() == version.unfit_worker(False) == ""
    for name, table in LIMITS.items():
        assert missing(sources, table) == []
        assert version.unfit_limit(name) == ""


@pytest.mark.parametrize("module", dict.fromkeys(owner.partition(":")[0] for owner in ALL))
def test_every_name_is_looked_for(module: str) -> None:
    """If names are renamed, the check reports each of them, or its class; of two alternative names it reports the
    first."""
    owners = {owner: ALL[owner] for owner in ALL if owner.partition(":")[0] == module}
    wanted = {owner: tuple(want for want in wants if not want.startswith("__")) for owner, wants in owners.items()}
    names = {
        owner: [[either.partition("(")[0] for either in want.split(" | ")] for want in wants]
        for owner, wants in wanted.items()
    }
    every = "|".join({name for each in names.values() for name in itertools.chain(*each)})
    renamed = Maimed(lambda text: re.sub(rf"\b({every})\b", r"\1_renamed", text) if every else text)
    short = {owner: owner.rpartition(":")[2] for owner in owners}
    reported = [f"{short[owner]}.{first}" for owner, each in names.items() for first, *_ in each]
    assert missing(renamed, wanted) == list(dict.fromkeys(reported))
    classes = [short[owner] for owner in owners if ":" in owner]
    if classes:
        every = "|".join(classes)
        without = Maimed(lambda text: re.sub(rf"^(class (?:{every}))\b", r"\1Renamed", text, flags=re.MULTILINE))
        assert missing(without, {owner: owners[owner] for owner in owners if ":" in owner}) == classes


@pytest.mark.parametrize("owner", [owner for owner, wanted in ALL.items() if any("=" in want for want in wanted)])
def test_every_argument_is_looked_for(owner: str) -> None:
    """If parameters are renamed, the check reports each call that names one of them."""
    wanted = tuple(want.split(" | ")[0] for want in ALL[owner] if "=" in want)
    arguments = "|".join(re.findall(r"\b(\w+)=", "".join(wanted)))
    found = missing(Maimed(functools.partial(re.sub, rf"\b({arguments})\b", r"\1_renamed")), {owner: wanted})
    assert len(found) == len(wanted)
    for want, problem in zip(wanted, found, strict=True):
        assert problem.startswith(f"{owner.rpartition(':')[2]}.{want.partition('(')[0]} (")


@pytest.mark.parametrize(
    ("owner", "before", "after", "problem"),
    [
        ("BlockPool", "def touch(self, blocks:", "def touch(self, *, blocks:", "too many positional arguments"),
        ("BlockPool", "ordered_blocks: Iterable", "tier: int, ordered_blocks: Iterable", "'ordered_blocks'"),
        ("KVCacheManager", "def get_blocks(self, request_id: str)", "def get_blocks(self)", "too many positional"),
        ("Request", "request_id: str,\n        prompt", "request_id: str, tenant: str,\n        prompt", "'tenant'"),
        ("GrammarOutput", "    grammar_bitmask:", "    rows: int\n    grammar_bitmask:", "'grammar_bitmask'"),
    ],
)
def test_other_parameters(owner: str, before: str, after: str, problem: str) -> None:
    (row,) = (name for name in ALL if name.endswith(f":{owner}"))
    changed: list[bool] = []

    def change(text: str) -> str:
        changed.append(before in text)
        return text.replace(before, after)

    (found,) = missing(Maimed(change), {row: ALL[row]})
    assert any(changed)
    assert problem in found


def test_every_method_that_the_agent_overrides_is_looked_for() -> None:
    """vLLM would call none under another name, and nothing would say so."""
    from vllm.v1.core.sched.scheduler import Scheduler

    from meridian_agent.engine.scheduler_mixin import GovernedScheduler

    owner = "vllm.v1.core.sched.scheduler:Scheduler"
    known = {member.partition("(")[0] for table in (ENGINE, PREMATURE_STOPS) for member in table[owner]}
    overridden = {name for name in vars(GovernedScheduler).keys() & vars(Scheduler).keys() if name[:2] != "__"}
    assert len(overridden) >= 12
    assert overridden - known == set()


def test_the_imported_vllm_is_looked_at_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched import async_scheduler
    from vllm.v1.worker.gpu_model_runner import ExecuteModelState

    monkeypatch.delattr(KVCacheManager, "evict_blocks")
    monkeypatch.setattr(BlockPool, "touch", lambda self, *, blocks: None)
    monkeypatch.delattr(async_scheduler, "AsyncScheduler")
    assert version.unfit() == (
        f"vLLM {version.vllm_version()} lacks: AsyncScheduler, KVCacheManager.evict_blocks,"
        " BlockPool.touch (too many positional arguments)"
    )
    monkeypatch.delattr(ExecuteModelState, "logits")
    monkeypatch.delitem(ExecuteModelState.__annotations__, "logits")
    assert version.unfit_worker(False) == f"vLLM {version.vllm_version()} lacks: ExecuteModelState.logits"
    monkeypatch.setattr(version, "vllm_version", lambda: "0.25.1")
    assert version.unfit() == "vLLM 0.25.1 is outside the supported 0.26 to 0.33"


@contextlib.contextmanager
def reported(module: str, folder: Path, **more: str) -> Iterator[tuple[dict[str, Any], Process, Control]]:
    """Start an engine, and yield what it says that it generates, its process and its control plane; the engine must end
    by itself."""
    control = Control(folder)
    env = {**ENGINE_ENV, "MERIDIAN_CONTROL": control.target, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", **more}
    engine = Process([sys.executable, "-m", f"tests.engine.{module}"], folder / "engine.log", env)

    def said() -> str | None:
        assert engine.popen.poll() is None, engine.output()[-3000:]
        return next((line for line in engine.output().splitlines() if line[:1] + line[-1:] == "{}"), None)

    try:
        yield json.loads(wait_for(said, 120, "the engine to say what it generates")), engine, control
        assert engine.stop() == 0
    finally:
        engine.kill()
        control.process.stop()


def test_an_engine_that_lacks_hooks_steps_aside_loudly(tmp_path: Path, stock: list[list[int]]) -> None:
    """The engine serves what stock vLLM serves; its log and the fleet name each missing hook."""
    lacks = "lacks: KVCacheManager.evict_blocks, BlockPool.touch (too many positional arguments)"
    with reported("lacking", tmp_path, MERIDIAN_ENGINE_ID="pod") as (found, engine, control):
        # Ranks of one name would end each other's streams.
        assert lacks in control.faulty("pod-dp1").fault
    assert found == {"scheduler": "Scheduler", "tokens": stock}
    assert f"no agent in this engine, vLLM runs as stock; vLLM {version.vllm_version()} {lacks}" in engine.output()


def test_an_engine_of_which_less_is_known_is_governed(tmp_path: Path, stock: list[list[int]]) -> None:
    """Without optional facts the engine serves what stock vLLM serves, obeys caps and takes policies; its log says once
    what is missing, and so does the fleet."""
    more = {"VLLM_USE_RUST_FRONTEND": "1", "VLLM_RUST_FRONTEND_PATH": "not-started"}
    with reported("less_known", tmp_path, **more) as (found, engine, control):
        shown = control.engine()
        assert (shown.fault, shown.unknown_markers, shown.nack_error) == ("", "", "")
        lacking = {fact.partition(" (")[0] for fact in shown.missing_facts}
        optional = {*OPTIONAL} - {"tokenizer", "markers", "sentence ends", "settings on disk"}
        assert lacking == optional
    assert found == {"tokens": stock, "ends": [9], "may_end": 3}
    lines = [line for line in engine.output().splitlines() if "the agent works without" in line]
    assert len(lines) == 1
    assert all(name in lines[0] for name in optional)
