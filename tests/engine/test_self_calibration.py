"""Self-calibration on the real engine: the control plane records each request of the sample in shadow as the engine has
measured it, for the model that the engine serves, and changes no token."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from meridian.v1 import fleet_pb2, fleet_pb2_grpc
from vllm import SamplingParams

from meridian_agent.vllm_adapter.model_fingerprint import fingerprint
from meridian_control.capabilities.control_group.requests import MAX_GAP_TOKENS, MISSING_GAPS, gap_tokens
from meridian_control.capabilities.self_calibration.episodes import Episode, name_of
from tests.engine import chat, choose, paced
from tests.engine.pacing import Settled
from tests.engine.recording import probes, records
from tests.engine.test_rules import CASES, GREEDY, free_run
from tests.processes import RPC_S, Control, wait_for

ASKED: dict[str, Any] = {
    "scheduler": {"min_think_tokens": 0},
    "entropy": {
        "self_calibration": True,
        "holdout_share": 0.2,
        "eat_probe_interval_tokens": 4,
        "eat_probe_placement": "anywhere",
    },
    "telemetry": {"shadow_sample_ratio": 0.5},
}


def stored(folder: Path) -> list[tuple[str, Episode]]:
    """Return the episodes in the control plane's store."""
    with sqlite3.connect(f"file:{folder / 'meridian.db'}?mode=ro", uri=True) as connection:
        rows = connection.execute("SELECT traffic, episode FROM self_calibration_episodes ORDER BY number").fetchall()
    return [(traffic, Episode.from_json(episode)) for traffic, episode in rows]


def test_the_sample_in_shadow_is_recorded_as_the_engine_measures_it(
    llm: Any, agent: Any, control: Control, settled: Settled, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, _ = free_run(llm, agent)
    end = agent.tracker.markers.end[0]
    control.apply(ASKED)
    # An idle engine takes a new share of measured requests over with its next step.
    chat(llm, CASES[:1], SamplingParams(max_tokens=1))
    control.settled()
    share = ASKED["telemetry"]["shadow_sample_ratio"]
    sample = {f"paced-{number}": number % 2 == 0 for number in range(2 * len(CASES))}
    choose(monkeypatch, share, sample)
    with records(agent) as seen:
        tokens = paced(llm, [*CASES, *CASES], GREEDY, settled)
    assert tokens == [*free, *free], "self-calibration in shadow changes no token"
    measured = probes(seen)
    assert {name.rpartition("-")[0] for name in measured} == {name for name, chosen in sample.items() if chosen}
    control.settled()
    natural = {name: tokens[int(name.split("-")[1])].index(end) for name in measured}
    near = {name: MISSING_GAPS * gap_tokens(natural[name], MAX_GAP_TOKENS) for name in measured}
    # This small engine refuses some probes for want of room; a request without a probe near its end tells nothing.
    expected = [name for name in measured if natural[name] - measured[name][-1].think_tokens <= near[name]]
    assert expected
    wait_for(lambda: len(stored(control.folder)) >= len(expected), RPC_S, "the episodes")
    kept = stored(control.folder)
    assert {traffic for traffic, _ in kept} == {f"{agent.facts.model}#{control.engine().model_fingerprint}#"}
    recorded = {
        episode.name: (episode.natural_tokens, [(s.think_tokens, round(s.eat_nats, 4)) for s in episode.samples])
        for _, episode in kept
    }
    assert recorded == {
        name_of(name): (natural[name], [(probe.think_tokens, round(probe.eat_nats, 4)) for probe in measured[name]])
        for name in expected
    }
    assert any(one.is_other for _, episode in kept for one in episode.samples)
    with control.channel() as channel:
        fleet = fleet_pb2_grpc.FleetServiceStub(channel)

        def counted() -> int:
            answer = fleet.ListSelfCalibrations(fleet_pb2.ListSelfCalibrationsRequest(), timeout=RPC_S)
            return sum(row.recorded_requests for row in answer.self_calibrations)

        wait_for(lambda: counted() == len(kept), RPC_S, "the leader's look")


def test_the_fingerprint_is_that_of_the_models_files(llm: Any, scheduler: Any, tmp_path: Path) -> None:
    config = scheduler.vllm_config
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"layers": 2}))
    (folder / "model.safetensors").write_bytes(bytes(100_000))
    made = config.model_config
    before, config.model_config.model = made.model, str(folder)
    try:
        first = fingerprint(config, "template")
        assert first == fingerprint(config, "template")
        assert first != fingerprint(config, "another template")
        with (folder / "model.safetensors").open("r+b") as weights:
            weights.seek(50_000)
            weights.write(bytes([1]) * 30_000)
        second = fingerprint(config, "template")
        assert second != first
        (folder / "config.json").write_text(json.dumps({"layers": 3}))
        assert fingerprint(config, "template") not in {first, second}
        config.model_config.model = "hub/model"
        assert len(fingerprint(config, None)) == 16
    finally:
        config.model_config.model = before
