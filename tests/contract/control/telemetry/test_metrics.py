"""The metrics in a scrape of a real control plane: the catalogue lists all of them, and no others."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2  # type: ignore[import-untyped]
from meridian.v1 import agent_pb2, fleet_pb2, policy_pb2, rollout_pb2
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from meridian_control.capabilities.control_group import metrics
from meridian_control.capabilities.control_group.fleet import Comparisons
from meridian_control.capabilities.listed import CAPABILITIES
from meridian_control.common.metric_entry import Entry
from meridian_control.fleet.fleet import Fleet
from meridian_control.policy.shortening_kinds import Kind
from meridian_control.rollout.state import GuardrailReading
from meridian_control.server.grpc_server import begin_answer
from meridian_control.telemetry import fleet_metrics
from meridian_control.telemetry.catalogue import catalogue
from meridian_control.telemetry.fleet_metrics import of_limit
from meridian_control.telemetry.grpc_metrics import ServerMetrics
from tests.contract.clients import calling
from tests.contract.control.app.test_server import NOT_SERVING, SERVING, Process
from tests.contract.rollouts import ALL, CANARY, starting
from tests.fakes.control import utc_now
from tests.fakes.linked import LinkedEngine, until
from tests.fakes.tables import policy
from tests.processes import free_port

OURS = ("meridian_", "grpc_")


def scraped(process: Process) -> dict[str, Metric]:
    """Return Meridian's metric families by the names under which they are exposed."""
    found = {}
    for family in text_string_to_metric_families(process.metrics()):
        if family.name.startswith(OURS) and not family.name.endswith("_created"):
            found[f"{family.name}_total" if family.type == "counter" else family.name] = family
    return found


def value(process: Process, name: str, **labels: str) -> float:
    """Return the sum of the samples with this name and these labels."""
    samples = [s for family in scraped(process).values() for s in family.samples if s.name == name]
    return sum(s.value for s in samples if labels.items() <= s.labels.items())


async def test_what_is_scraped_is_what_the_catalogue_lists(running: Process) -> None:
    with LinkedEngine([running.target], "listed") as engine:
        engine.open("a")
        await engine.steps_until(engine.caps)
        families = await asyncio.to_thread(scraped, running)
    assert set(families) == set(catalogue(CAPABILITIES))
    for name, family in families.items():
        entry = catalogue(CAPABILITIES)[name]
        assert (family.type, family.documentation) == (entry.kind, entry.text)
        labels = {label for s in family.samples for label in s.labels} - {"le"}
        assert labels <= set(entry.labels), name


@pytest.mark.parametrize("entry", list(catalogue(CAPABILITIES).values()), ids=lambda e: e.name)
def test_names_follow_the_fields_conventions(entry: Entry) -> None:
    assert entry.name.endswith("_total") == (entry.kind == "counter")
    assert not entry.name.endswith(("_ms", "_us", "_kib", "_percent", "_count", "_sum", "_bucket"))


async def test_an_engine_and_its_agent(own: Process) -> None:
    await own.started()
    # Prometheus does not see a burst with which a series begins.
    ends = {s.labels["reason"] for s in scraped(own)["meridian_stream_ends_total"].samples if s.name.endswith("_total")}
    assert ends > {"overflow", "invalid_request", "memory_exceeded", "internal", "permission_denied", "too_many"}
    with LinkedEngine([own.target], "measured") as engine:
        engine.link.outbox.reports_dropped = 3
        engine.open("a")
        await engine.steps_until(engine.caps)
        await engine.steps_until(lambda: value(own, "meridian_outcomes_total", kind="plan", outcome="applied"))
        of = {"engine": "measured"}
        assert value(own, "meridian_engine_state", **of, state="ready") == 1
        assert value(own, "meridian_engine_state", **of, state="stale") == 0
        assert value(own, "meridian_engine_revision", **of) == value(own, "meridian_policy_revision") == 1
        assert value(own, "meridian_engine_requests", **of, phase="think", state="generating") == 1
        assert value(own, "meridian_engine_requests", **of) == 1
        assert value(own, "meridian_decisions_total", kind="cap") == 1
        assert value(own, "meridian_decision_staleness_steps_count") > 0
        assert value(own, "meridian_engine_info", **of, model="m") == 1
    await until(lambda: value(own, "meridian_engine_state", **of, state="stale") == 1)
    assert value(own, "meridian_engine_state", **of) == 1
    assert value(own, "meridian_engines") == 0
    assert value(own, "meridian_stream_ends_total") == 1


async def test_efforts_that_are_not_known(running: Process) -> None:
    """The metric has one series, whatever clients write."""
    with LinkedEngine([running.target], "measured") as engine:
        engine.open("first", effort="low")
        await engine.steps_until(engine.caps)
        for effort in ("high", "turbo", "a" * 100, "\u2028"):
            engine.open(f"r{len(effort)}", effort=effort)
        await engine.steps_until(lambda: value(running, "meridian_unknown_efforts_total") == 3)
    (sample,) = (s for s in scraped(running)["meridian_unknown_efforts_total"].samples if s.name.endswith("_total"))
    assert sample.labels == {}


async def test_thinking_by_tenant(running: Process) -> None:
    """Every token counts once, whether its request lives, has ended, or its engine is gone."""
    name = "meridian_tenant_think_tokens_total"
    with LinkedEngine([running.target], "billed") as engine:
        engine.open("first")
        await engine.steps_until(engine.caps)
        for request, tenant in (("a", "acme"), ("b", "acme"), ("c", "beta")):
            engine.open(request, tenant=tenant)
        for _ in range(9):
            engine.step()
        await until(lambda: value(running, name, tenant="beta", model="model") == 9)
        assert value(running, name, tenant="acme", model="model") == 18
        engine.engine.abort("a")
        for _ in range(3):
            engine.step()
        await until(lambda: value(running, name, tenant="beta") == 12)
    await until(lambda: value(running, "meridian_engines") == 0)
    assert value(running, name, tenant="acme") == 21


async def test_a_rollout(running: Process) -> None:
    assert value(running, "meridian_rollout_state") == 0
    async with calling(running.target) as clients:
        with LinkedEngine([running.target], "staged"):
            await clients.rollout.StartRollout(starting(CANARY, ALL, guardrails={"degraded_engines": 2, "nacks": 0}))
            assert value(running, "meridian_rollout_state", state="running") == 1
            assert value(running, "meridian_rollout_state") == value(running, "meridian_rollout_step") == 1
            assert value(running, "meridian_rollout_steps") == 2
            assert value(running, "meridian_rollout_age_seconds") >= 0
            await until(lambda: value(running, "meridian_rollout_engines", policy="other") == 1)
            assert value(running, "meridian_rollout_engines") == 1
            read = [s for s in scraped(running)["meridian_rollout_guardrail_ratio"].samples if s.value == 0]
            assert {s.labels["guardrail"] for s in read} == {"degraded_engines", "nacks"}
            before_s = time.monotonic()
            await clients.rollout.AbortRollout(rollout_pb2.AbortRolloutRequest(rollout_id=1))
            assert value(running, "meridian_rollout_state", state="aborted") == 1
            assert value(running, "meridian_rollout_state", state="running") == 0
            assert 0 <= value(running, "meridian_rollout_age_seconds") <= time.monotonic() - before_s


@pytest.mark.parametrize(("reading", "limit", "ratio"), [(30.0, 40.0, 0.75), (2, 0, math.inf), (0, 0, 0.0)])
def test_a_guardrail_beside_its_limit(reading: float, limit: float, ratio: float) -> None:
    assert of_limit(GuardrailReading(guardrail="nacks", value=reading, limit=limit, observations=1)) == ratio


async def test_calls(running: Process) -> None:
    service = {"grpc_service": "meridian.v1.PolicyService", "grpc_method": "GetPolicy"}
    async with calling(running.target) as clients:
        await clients.policy.GetPolicy(policy_pb2.GetPolicyRequest())
        with pytest.raises(grpc.aio.AioRpcError):
            await clients.policy.GetPolicy(policy_pb2.GetPolicyRequest(revision=99))
        with pytest.raises(grpc.aio.AioRpcError, match="UNIMPLEMENTED"):
            await clients.channel.unary_unary("/no.such.Service/Method")(b"")  # type: ignore[arg-type]
        watching = clients.health.Watch(health_pb2.HealthCheckRequest())
        await watching.read()
        watch = {"grpc_service": "grpc.health.v1.Health", "grpc_method": "Watch", "grpc_type": "server_stream"}
        watching.cancel()
        await until(lambda: value(running, "grpc_server_handled_total", **watch, grpc_code="CANCELLED") == 1)
    assert value(running, "grpc_server_started_total", **service) == 2
    assert value(running, "grpc_server_handled_total", **service, grpc_code="OK") == 1
    assert value(running, "grpc_server_handled_total", **service, grpc_code="NOT_FOUND") == 1
    assert value(running, "grpc_server_msg_received_total", **service) == 2
    assert value(running, "grpc_server_msg_sent_total", **service) == 1
    assert value(running, "grpc_server_handling_seconds_count", **service) == 2
    assert value(running, "grpc_server_started_total", grpc_service="no.such.Service") == 0


def test_the_control_group_in_metrics() -> None:
    fleet = Fleet(utc_now, capabilities=CAPABILITIES)
    experiment = fleet.part(Comparisons).experiments.experiment_of(3, policy(entropy={"shadow": False}))
    experiment.counts.control.requests, experiment.counts.control.think_tokens, experiment.counts.treated.aborts = (
        7,
        700,
        2,
    )
    budget = experiment.kinds[Kind("budget", "acme")]
    budget.judged, budget.harmful, budget.unjudged, experiment.counts.shadow_saved_tokens = 5, 1, 2, 40
    told = fleet_pb2.Savings(in_force=True, evidence_ratio=0.5, drift_evidence_ratio=0.25)
    told.saved_ratio.value, told.saved_ratio.low, told.saved_ratio.high = 0.3, 0.1, 0.5
    older = fleet_pb2.Savings(evidence_ratio=9.0)
    told.kinds.add(kind="budget", name="acme", evidence_ratio=0.5).harm_ratio.high = 0.75
    told.kinds.add(kind="cap", evidence_ratio=0.125)
    budget.forced_ends.ends, budget.natural_ends.aborts = 6, 1
    total = fleet.part(Comparisons).experiments.total()
    values = dict(metrics.values(total, False, fleet_pb2.GetSavingsResponse(savings=[told, older])))
    ends = dict(values["meridian_compared_ends_total"])
    acme = ("budget", "acme")
    assert (ends[*acme, "forced", "ended"], ends[*acme, "natural", "abort"]) == (6, 1)
    assert ends[*acme, "natural", "ended"] == 0
    assert dict(values["meridian_saved_ratio"]) == {("value",): 0.3, ("low",): 0.1, ("high",): 0.5}
    assert dict(values["meridian_arm_requests_total"]) == {("treated",): 0, ("control",): 7}
    assert dict(values["meridian_arm_think_tokens_total"])["control",] == 700
    assert dict(values["meridian_arm_events_total"])["treated", "abort"] == 2
    verdicts = dict(values["meridian_control_group_verdicts_total"])
    rules = {("entropy", "", verdict): 0 for verdict in ("harmless", "harmful", "unjudged")}
    assert verdicts == {(*acme, "harmless"): 4, (*acme, "harmful"): 1, (*acme, "unjudged"): 2, **rules}
    assert values["meridian_control_group_shadow_saved_tokens_total"] == [((), 40)]
    assert dict(values["meridian_saved_ratio"]) == {("value",): 0.3, ("low",): 0.1, ("high",): 0.5}
    assert dict(values["meridian_harm_ratio"])[*acme, "high"] == 0.75
    assert ("cap", "", "value") not in dict(values["meridian_harm_ratio"]), "harm that is not measured is not 0"
    assert dict(values["meridian_harm_evidence_ratio"]) == {acme: 0.5, ("cap", ""): 0.125}
    assert values["meridian_drift_evidence_ratio"] == [((), 0.25)]
    assert values["meridian_entropy_withdrawn"] == [((), False)]
    told.ClearField("drift_evidence_ratio")
    undescribed = dict(metrics.values(total, False, fleet_pb2.GetSavingsResponse(savings=[told])))
    assert undescribed["meridian_drift_evidence_ratio"] == []
    assert dict(metrics.values(total, False, None))["meridian_saved_ratio"] == []


async def test_a_stream_of_reports(own: Process) -> None:
    await own.started()
    connect = {"grpc_method": "Connect", "grpc_type": "bidi_stream"}
    with LinkedEngine([own.target]) as engine:
        engine.open("a")
        await engine.steps_until(lambda: engine.caps() and value(own, "meridian_reports_total"))
        assert value(own, "grpc_server_started_total", **connect) == 1
        # The last reports may be under way, so the messages are counted after the reports.
        reports = value(own, "meridian_reports_total")
        assert value(own, "grpc_server_msg_received_total", **connect) > reports > 0
        assert value(own, "grpc_server_msg_sent_total", **connect) > 2
    await until(lambda: value(own, "grpc_server_handled_total", **connect) == 1)


async def test_health_on_a_port_of_its_own(own: Process) -> None:
    port = free_port()
    own.options = ("--health-listen", f"127.0.0.1:{port}")
    await own.started()
    async with calling(f"127.0.0.1:{port}") as clients:
        response = await clients.health.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=60)
        assert response.status == SERVING
        with pytest.raises(grpc.aio.AioRpcError, match="UNIMPLEMENTED"):
            await clients.policy.GetPolicy(policy_pb2.GetPolicyRequest())
        watching = clients.health.Watch(health_pb2.HealthCheckRequest())
        assert (await watching.read()).status == SERVING
        ending = asyncio.create_task(own.terminate())
        assert (await watching.read()).status == NOT_SERVING
        watching.cancel()
        assert await ending == 0


async def test_a_call_that_outlasts_the_server_is_cancelled() -> None:
    """A call that begins as the server stops may read, or begin its answer, only afterwards."""
    registry, stopped = CollectorRegistry(), asyncio.Event()
    begun, over = asyncio.Semaphore(0), asyncio.Semaphore(0)

    async def outlast(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        begun.release()
        while not stopped.is_set():
            with suppress(asyncio.CancelledError):
                await stopped.wait()
        try:
            if "answers" in dict(context.invocation_metadata()):
                await begin_answer(context)
            yield await anext(aiter(requests))
        finally:
            over.release()

    server = grpc.aio.server(interceptors=[ServerMetrics(registry)])
    methods: dict[str, Any] = {"Outlast": grpc.stream_stream_rpc_method_handler(outlast)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("tests.Stopping", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call: Any = channel.stream_stream("/tests.Stopping/Outlast")
        calls = [call(), call(metadata=[("answers", "")])]
        for _ in calls:
            await begun.acquire()
        await server.stop(None)
        stopped.set()
        for _ in calls:
            await over.acquire()
    (handled,) = (family for family in registry.collect() if family.name == "grpc_server_handled")
    counts = {s.labels["grpc_code"]: s.value for s in handled.samples if s.name.endswith("_total")}
    assert counts == {"CANCELLED": 2}


def test_the_hooks_seconds_stand_still_while_the_threads_take_time() -> None:
    seen = set()
    for look in range(100):
        worker, threads = 0.1 * look, 0.37 * look
        counters = agent_pb2.AgentCounters(worker_seconds=worker, thread_seconds=threads)
        counters.agent_seconds = 12.3456789 + worker + threads
        seen.add(fleet_metrics._spent(counters)["hooks"])
    assert len(seen) == 1, "a counter that falls counts as one that began anew"
