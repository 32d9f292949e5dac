"""Handovers over real streams: one engine thinks, another one answers, and the control plane tells both stories."""

from __future__ import annotations

from typing import Any

import pytest
from meridian.v1 import agent_pb2, fleet_pb2

from meridian_control.capabilities.handover.fleet import FleetHandovers
from meridian_control.capabilities.handover.stream import EngineHandovers
from tests.contract.clients import calling
from tests.contract.control.fleet.test_record import replayed
from tests.contract.raw_engine import RawEngine
from tests.contract.streams import Control
from tests.fakes.fleets import engines_of
from tests.fakes.linked import until
from tests.unit.control.capabilities.handover.engines import ANSWERING, disagg, hello, pending

STOP, APPLIED = agent_pb2.FINISH_REASON_STOP, agent_pb2.OUTCOME_APPLIED


def opened(request_id: str, phase: agent_pb2.Phase.ValueType, **fields: Any) -> list[agent_pb2.RequestOpened]:
    return [agent_pb2.RequestOpened(request_id=request_id, model="m", prompt_tokens=160, phase=phase, **fields)]


async def continued(a: RawEngine, b: RawEngine, move: agent_pb2.HandOver) -> None:
    """Report that engine a has handed its request over, and that engine b continues it."""
    applied = agent_pb2.DecisionOutcome(decision_id=move.decision_id, outcome=APPLIED, detail="10 blocks")
    await a.report(outcomes=[applied], closed=[agent_pb2.RequestClosed(reason=STOP, handed_over=True)])
    await b.report(opened=opened("on-b", agent_pb2.PHASE_OUTPUT, handed_over_ref=move.ref))
    await b.report(continued=agent_pb2.ContinuedColumns(slot=[0], transferred_tokens=[160], first_token_ms=[31.0]))


async def test_a_request_thinks_on_one_engine_and_answers_on_another(control: Control) -> None:
    stored = await control.set_policy(disagg())
    recording = control.fleet.record("")
    async with calling(control.target) as clients:
        fleet = clients.fleet
        a = await RawEngine(clients.channel, hello("a")).connect()
        b = await RawEngine(clients.channel, hello("b", ANSWERING)).connect()
        await until(lambda: [e.acked_revision for e in engines_of(control.fleet)] == [stored.revision] * 2)
        await until(lambda: all(c.session.gauges is not None for c in control.fleet.connections))
        control.fleet.part(FleetHandovers).share()
        thinks = opened("on-a", agent_pb2.PHASE_THINK, hand_over_candidate=True)
        await a.report(opened=thinks, kv_used=0.95)
        move = await a.hand_over()
        assert (move.slot, move.url, move.shadow) == (0, "http://b:8000", False)
        await continued(a, b, move)
        await until(lambda: control.fleet.part(FleetHandovers).results.total() == {"handed_over": 1})
        await until(lambda: pending(control.fleet.part(FleetHandovers).results) == 0)
        for request_id, other in (("on-a", "on-b"), ("on-b", "on-a")):
            answer = await fleet.ExplainRequest(fleet_pb2.ExplainRequestRequest(request_id=request_id))
            assert [life.request_id for life in answer.related] == [other]
            lives = {life.request_id: life for life in (answer.life, *answer.related)}
            (decision,) = [e.decision for e in lives["on-a"].events if e.decision.kind == "hand_over"]
            handed = decision.hand_over
            assert (decision.reason, decision.outcome, decision.detail) == ("kv_pressure", APPLIED, "10 blocks")
            assert (handed.engine_id, handed.blocks, handed.result) == ("b", 10, "handed_over")
            compared = {row.signal: row.value for row in decision.comparisons}
            assert compared == {"blocks": 10, "thinking_kv_used": pytest.approx(0.95), "answering_kv_used": 0}
            assert lives["on-a"].events[-1].detail == "handed_over"
        listed = {e.engine_id: e for e in (await fleet.ListEngines(fleet_pb2.ListEnginesRequest())).engines}
        assert (listed["a"].pool, listed["b"].pool) == ("thinking", "answering")
        assert dict(listed["a"].handovers) == {"handed_over": 1}
        local = await fleet.ListEngines(fleet_pb2.ListEnginesRequest(local_only=True))
        assert [(c.ref, c.engine_id, c.transferred_tokens) for c in local.continued] == [(move.ref, "b", 160)]
        waiting = map(fleet_pb2.TraceRecord.FromString, recording._waiting)
        records = [record for record in waiting if record.engine_id == "a"]
        again = [move for response in replayed(records) for move in response.directives.hand_overs]
        assert [(m.decision_id, m.slot, m.url, m.ref) for m in again] == [(move.decision_id, 0, move.url, move.ref)]
        b.call.cancel()
        await until(lambda: not control.connected("b"))
        control.fleet.part(FleetHandovers).share()
        assert [c.session.part(EngineHandovers).pool for c in control.fleet.connections] == [()]
