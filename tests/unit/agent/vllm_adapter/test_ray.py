"""Actors that vLLM starts on a Ray cluster get the agent's variables."""

from __future__ import annotations

import logging

import pytest

from tests.needed import VLLM

pytest.importorskip("vllm", reason=VLLM.reason)

from vllm.envs import compile_factors
from vllm.ray import ray_env

from meridian_agent.install import reach_ray


def test_the_agents_variables_reach_actors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_env, "DEFAULT_ENV_VAR_PREFIXES", {"VLLM_"})
    monkeypatch.setenv("MERIDIAN_CONTROL", "host:50051")
    assert "MERIDIAN_CONTROL" not in ray_env.get_env_vars_to_copy()
    factors = compile_factors()
    reach_ray()
    assert "MERIDIAN_CONTROL" in ray_env.get_env_vars_to_copy()
    assert compile_factors() == factors, "the keys of the compilation cache stay those of stock vLLM"


def test_a_vllm_without_these_prefixes_needs_no_ray(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(ray_env, "DEFAULT_ENV_VAR_PREFIXES")
    with caplog.at_level(logging.INFO, "vllm.meridian"):
        reach_ray()
    assert [(record.levelno, record.exc_info) for record in caplog.records] == [(logging.INFO, None)]
