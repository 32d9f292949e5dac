"""Ends of thinking that operators ask for: FleetService.EndThinking and `meridianctl end` against real servers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
import pytest
from meridian.v1 import agent_pb2, audit_pb2, fleet_pb2

from meridian_control.common.enum_names import outcome_name
from meridian_control.fleet import thinking_ends
from meridian_control.fleet.membership import LEASE_S
from meridian_control.fleet.thinking_ends import MAX_WAIT_MS, NAMED
from meridian_control.page import contents
from meridian_control.page.contents import newest_ends
from meridian_control.page.words import end_row
from tests.contract.clients import calling
from tests.contract.control.app.test_server import Process
from tests.contract.control.fleet.test_whole_fleet import stepping
from tests.contract.control.telemetry.test_metrics import scraped, value
from tests.contract.ctl import FAILED, INVALID, OK, UNREACHABLE, ctl, run
from tests.contract.ctl import Control as FakeControl
from tests.contract.ctl import control as fake_control  # noqa: F401 - a fixture
from tests.contract.secured import Secured
from tests.contract.streams import Control, refusal
from tests.fakes.fleets import requests_of
from tests.fakes.linked import LinkedEngine, until
from tests.fakes.tables import policy
from tests.replicated import Replicated, client, until_answer

WAIT = {"wait_ms": MAX_WAIT_MS}
NOTHING = {"enabled": False}
ID = "chatcmpl-mine-9f"


def state(answer: fleet_pb2.EndThinkingResponse) -> str:
    return fleet_pb2.EndThinkingState.Name(answer.state).removeprefix("END_THINKING_STATE_")


async def end(target: str, request_id: str, **fields: Any) -> fleet_pb2.EndThinkingResponse:
    async with calling(target) as clients:
        request = fleet_pb2.EndThinkingRequest(request_id=request_id, **fields)
        answer: fleet_pb2.EndThinkingResponse = await clients.fleet.EndThinking(request)
        return answer


async def ended(target: str, request_id: str, **fields: Any) -> list[fleet_pb2.EndThinkingResponse]:
    """Repeat the call until its decision has an outcome, and return all answers."""
    answers = [await end(target, request_id, **WAIT, **fields)]
    while not answers[-1].outcome:
        answers.append(await end(target, request_id, **WAIT, **fields))
    return answers


async def thinking(linked: LinkedEngine, control: Control, *names: str) -> None:
    """Open requests, and wait until the control plane knows that they think, and the engine has applied the policy."""
    for name in names:
        linked.open(name)
    await linked.steps_until(lambda: sum(live.think_tokens > 0 for live in requests_of(control.fleet)) == len(names))
    await linked.steps_until(lambda: control.engine(linked.engine_id).acked_revision == control.fleet.revision)


async def test_one_decision_whoever_asks_how_often(control: Control) -> None:
    """The rules are off. The first call makes the decision, and all later calls get the same decision."""
    await control.set_policy(policy(scheduler=NOTHING, entropy=NOTHING))
    with LinkedEngine([control.target]) as linked:
        await thinking(linked, control, ID)
        # The engine makes no step meanwhile, so the end stays under way.
        first, *others = [await end(control.target, ID, wait_ms=1) for _ in range(3)]
        assert (state(first), first.reason, first.outcome, first.engine_id) == ("ENDING", "operator", 0, "engine")
        assert first.request_id == ID
        assert first.think_tokens > 0
        for again in others:
            assert state(again) == "ALREADY_ENDING"
            assert (again.session_id, again.decision_id) == (first.session_id, first.decision_id)
        async with stepping(linked):
            *_, last = await ended(control.target, "mine")
            assert (last.decision_id, outcome_name(last.outcome)) == (first.decision_id, "applied")
            await until(lambda: control.engine().ends["operator"] == 1)
            after = await end(control.target, "mine")
            assert (state(after), after.decision_id, outcome_name(after.outcome)) == (
                "ANSWERING",
                first.decision_id,
                "applied",
            )
        engine = control.engine()
        assert engine.decisions["force/operator"] == 1
        assert not linked.engine.thinking(ID)
        forced = [outcomes for i, outcomes in linked.engine.outcomes.items() if i == first.decision_id]
        assert [len(outcomes) for outcomes in forced] == [1]
        linked.engine.finish(ID)
        await linked.steps_until(lambda: not control.names())
        assert await refusal(end(control.target, "mine")) == (
            grpc.StatusCode.NOT_FOUND,
            'no live request "mine" on any engine; it has finished',
        )


async def test_the_call_waits_for_the_outcome_and_no_longer(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thinking_ends, "MAX_WAIT_MS", 3_600_000)
    with LinkedEngine([control.target]) as linked:
        await thinking(linked, control, "a")
        waiting = asyncio.create_task(end(control.target, "a", wait_ms=3_600_000))
        await until(lambda: any(c.waiting for c in control.fleet.connections))
        assert not waiting.done()
        await linked.steps_until(lambda: control.engine().ends["operator"])
        answer = await waiting
        assert (state(answer), outcome_name(answer.outcome)) == ("ENDING", "applied")
        assert answer.think_tokens > 0
        assert not any(c.waiting for c in control.fleet.connections)


async def test_a_stream_that_ends_ends_the_wait(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thinking_ends, "MAX_WAIT_MS", 3_600_000)
    with LinkedEngine([control.target]) as linked:
        await thinking(linked, control, "a")
        waiting = asyncio.create_task(end(control.target, "a", wait_ms=3_600_000))
        (connection,) = control.fleet.connections
        await until(lambda: connection.waiting)
        connection.close("test")
        assert outcome_name((await waiting).outcome) == "agent_off"


async def test_bad_ids_and_waits(control: Control) -> None:
    names = [f"chatcmpl-same-{number}" for number in range(NAMED + 1)]
    with LinkedEngine([control.target]) as linked:
        await thinking(linked, control, *names, "chatcmpl-own", "chatcmpl-own-1")
        bad, missing = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
        assert await refusal(end(control.target, "")) == (bad, "request_id must not be empty")
        assert await refusal(end(control.target, "a", wait_ms=-1)) == (bad, "wait_ms must be at least 0; got -1")
        code, text = await refusal(end(control.target, "same"))
        assert code is bad
        assert text.startswith("request_id 'same' is ambiguous; it names \"chatcmpl-same-0\" on engine, ")
        # The status is cut; the details of the error name all that `meridianctl end` lists.
        assert text.endswith("…")
        assert await refusal(end(control.target, "nobody")) == (missing, 'no live request "nobody" on any engine')
        assert await refusal(end(control.target, names[0], engine_id="other")) == (
            missing,
            f'no live request "{names[0]}" on engine "other"',
        )
        assert control.engine().decisions["force/operator"] == 0
        # The id of one request is the client's part of another's: the whole id counts.
        assert (await end(control.target, "chatcmpl-own")).request_id == "chatcmpl-own"
        assert control.engine().decisions["force/operator"] == 1


async def test_an_engine_whose_agent_is_off(control: Control) -> None:
    """The agent no longer reports requests, but the decision log knows where the request was."""
    with LinkedEngine([control.target]) as linked:
        await thinking(linked, control, "a")
        linked.said["fault"] = "freeing: KeyError"
        linked.engine.tracker.by_id.clear()
        (connection,) = control.fleet.connections
        connection.close("test")
        await until(lambda: any(c.session.hello.fault for c in control.fleet.connections))
        await until(lambda: connection not in control.fleet.connections and not control.names())
        answer = await end(control.target, "a")
        assert (state(answer), answer.engine_id, answer.decision_id) == ("AGENT_OFF", "engine", 0)


async def test_an_engine_that_is_gone(control: Control) -> None:
    with LinkedEngine([control.target]) as linked:
        await thinking(linked, control, "a")
    await until(lambda: not control.fleet.connections)
    assert await refusal(end(control.target, "a")) == (
        grpc.StatusCode.NOT_FOUND,
        'no live request "a" on any engine; engine "engine", which had it, has no stream or no longer reports it',
    )


# ------------------------------------------------------------------------------------------------- roles and audit


async def test_operators_may_and_the_audit_log_says_who_did_what(secured: Secured) -> None:
    asked = fleet_pb2.EndThinkingRequest(request_id="mine", reason="a customer waits", wait_ms=MAX_WAIT_MS)
    with LinkedEngine([secured.target], "agent", credentials=secured.agent("agent")) as linked:
        linked.open(ID)
        await linked.steps_until(lambda: any(live.think_tokens for live in requests_of(secured.fleet)))
        for who in ("viewer", "agent", "nobody"):
            async with secured.calling(who) as caller:
                code, _ = await refusal(caller.fleet.EndThinking(asked))
                assert code is grpc.StatusCode.PERMISSION_DENIED
        assert linked.engine.thinking(ID)
        async with stepping(linked), secured.calling("operator") as operator:
            while not (await operator.fleet.EndThinking(asked)).outcome:
                pass
    async with secured.calling("admin") as admin:
        wanted = audit_pb2.ListAuditRequest(method="FleetService/EndThinking", request_id="mine")
        records = (await admin.audit.ListAudit(wanted)).records
        wanted = audit_pb2.ListAuditRequest(method="FleetService/EndThinking", outcome="PERMISSION_DENIED")
        refused = (await admin.audit.ListAudit(wanted)).records
    newest = records[0]
    assert (newest.principal, newest.role, newest.outcome) == ("operator", "operator", "OK")
    assert (newest.request_id, newest.reason) == ("mine", "a customer waits")
    assert newest.details["outcome"] == "OUTCOME_APPLIED"
    assert records[-1].details["state"] == "END_THINKING_STATE_ENDING"
    assert newest.details["wait_ms"] == str(MAX_WAIT_MS)
    assert [record.principal for record in refused] == ["nobody", "agent", "viewer"]


# ---------------------------------------------------------------------------------------------- meridianctl and views


async def test_meridianctl(control: Control) -> None:
    # The engine makes steps while the commands run, and no cap may end a thinking meanwhile.
    await control.set_policy(policy(scheduler=NOTHING, entropy=NOTHING))
    with LinkedEngine([control.target]) as linked:
        await thinking(linked, control, ID, "other")
        slow = await ctl(control, "end", "mine", "--reason", "a customer waits", "--wait", 0)
        assert slow.exit_code == OK, slow.output
        assert slow.stdout.startswith(f"request {ID} on engine is being ended by decision ")
        assert "(operator) of session " in slow.stdout
        late = await ctl(control, "end", "mine", "--wait", 0.001)
        assert late.exit_code == FAILED
        assert "is already being ended by decision " in late.stdout
        assert late.stderr == f"no outcome within 0.001 s: `meridianctl explain {ID}` shows it later\n"
        async with stepping(linked):
            await until(lambda: control.engine().ends["operator"])
            after = await ctl(control, "end", "mine", "-o", "json")
            assert after.exit_code == OK
            told = json.loads(after.stdout)
            assert (told["state"], told["outcome"]) == ("END_THINKING_STATE_ANSWERING", "OUTCOME_APPLIED")
            shown = await ctl(control, "end", "mine")
            assert (
                f"request {ID} on engine is already answering; decision {told['decision_id']} (operator)"
                in shown.stdout
            )
            while (waited := await ctl(control, "end", "other", "--wait", 5, "--engine", "engine")).exit_code:
                assert "no outcome within 5 s" in waited.stderr
            assert ": applied at " in waited.stdout
        explained = await ctl(control, "explain", "mine")
        assert "an operator asked for the answer" in explained.stdout
        assert "a customer waits" in explained.stdout
        assert "thinking ended: an operator asked for the answer" in explained.stdout
        listed = json.loads((await ctl(control, "decisions", "--reason", "operator", "-o", "json")).stdout)
        assert {d["operator_reason"] for d in listed} == {"", "a customer waits"}
        missing = await ctl(control, "end", "nobody")
        assert (missing.exit_code, missing.stderr) == (FAILED, 'NOT_FOUND: no live request "nobody" on any engine\n')
        assert (await ctl(control, "end", "")).exit_code == INVALID
    assert (await run("end", "x", server="127.0.0.1:1")).exit_code == UNREACHABLE


WORDS = [
    ("ENDING", "APPLIED", OK, "is being ended by decision 7 (operator) of session s: applied at 9 thinking tokens"),
    ("ENDING", "ENDED_NATURALLY", OK, ": thinking ended first at 9 thinking tokens"),
    ("ENDING", "REFUSED", FAILED, "the thinking was not ended: refused by the engine"),
    ("ALREADY_ENDING", "AGENT_OFF", FAILED, "the thinking was not ended: agent off or frozen, or stream lost"),
    ("ALREADY_ENDING", "UNSPECIFIED", FAILED, "no outcome within 2 s"),
    ("ANSWERING", "UNSPECIFIED", OK, "is already answering; decision 7 (operator) of session s was made: no"),
    ("NOT_THINKING_YET", "UNSPECIFIED", FAILED, "request a on e has generated no token yet"),
    ("UNKNOWN_MARKERS", "UNSPECIFIED", FAILED, "its engine does not know the thinking markers"),
    ("CANNOT_FORCE", "UNSPECIFIED", FAILED, "its engine cannot force an end of thinking"),
    ("AGENT_OFF", "UNSPECIFIED", FAILED, "a fault has switched its engine's agent off"),
    ("NO_POLICY", "UNSPECIFIED", FAILED, "its engine has not applied a policy yet"),
    ("FROZEN", "UNSPECIFIED", FAILED, "request a on e cannot be ended: its engine is frozen"),
]


async def test_words_and_exit_codes(fake_control: FakeControl) -> None:  # noqa: F811
    for shown, outcome, code, words in WORDS:
        fake_control.fleet.end = fleet_pb2.EndThinkingResponse(
            state=fleet_pb2.EndThinkingState.Value(f"END_THINKING_STATE_{shown}"),
            request_id="a",
            engine_id="e",
            session_id="s",
            decision_id=7,
            reason="operator",
            outcome=agent_pb2.Outcome.Value(f"OUTCOME_{outcome}"),
            think_tokens=9,
        )
        result = await fake_control("end", "a")
        assert (result.exit_code, words in result.output) == (code, True), result.output


async def test_the_status_page_lists_reached_caps_of_long_ago(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request gets the decision on its cap when it opens, so that other requests have newer ones."""
    monkeypatch.setattr(contents, "ASKED_DECISIONS", 2)
    await control.set_policy(policy(scheduler={"max_think_tokens": 5, "min_think_tokens": 0}, entropy=NOTHING))
    with LinkedEngine([control.target]) as linked:
        await thinking(linked, control, "a")
        await linked.steps_until(lambda: control.engine().ends["hard_cap"])
        for name in "bcd":
            linked.open(name)
        linked.step()
        await linked.hears(lambda: control.engine().decisions["cap"] == 4)
        (shown,) = await newest_ends(control.parts.whole)
    assert (shown.request_id, shown.outcome) == ("a", agent_pb2.OUTCOME_APPLIED)
    assert end_row(shown)["time"] == shown.outcome_time.ToJsonString()


async def test_metrics(own: Process) -> None:
    await own.started()
    assert value(own, "meridian_think_ends_total", reason="operator") == 0
    assert any(s.labels == {"reason": "operator"} for s in scraped(own)["meridian_think_ends_total"].samples), (
        "the series begins with 0"
    )
    with LinkedEngine([own.target]) as linked:
        linked.open("a")
        await linked.steps_until(linked.caps)
        async with stepping(linked):
            await ended(own.target, "a")

            async def counted() -> tuple[float, float]:
                ends = await asyncio.to_thread(value, own, "meridian_think_ends_total", reason="operator")
                made = await asyncio.to_thread(value, own, "meridian_decisions_total", reason="operator")
                return ends, made

            await until_answer(counted, (1.0, 1.0))


# --------------------------------------------------------------------------------------------------- several replicas


async def test_any_replica_passes_the_call_on(replicated: Replicated) -> None:
    one, two = await replicated.pair()
    with LinkedEngine([one.target], "first") as first, LinkedEngine([two.target], "second") as second:
        first.open("chatcmpl-both-1")
        second.open("chatcmpl-both-2")
        await first.steps_until(first.caps)
        await second.steps_until(second.caps)
        async with stepping(first, second), client(one) as asked:
            await until_answer(asked.requests, ["chatcmpl-both-1", "chatcmpl-both-2"])
            code, text = await refusal(end(one.target, "both"))
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert '"chatcmpl-both-1" on first, "chatcmpl-both-2" on second' in text
            # The engine is on replica two. Both replicas are asked at once, and there is still one decision.
            answers = await asyncio.gather(
                *(ended(process.target, "both", engine_id="second") for process in (one, two, one))
            )
            flat = [answer for several in answers for answer in several]
            assert len({(answer.session_id, answer.decision_id) for answer in flat}) == 1
            assert sum(state(answer) == "ENDING" for answer in flat) == 1
            assert {outcome_name(several[-1].outcome) for several in answers} == {"applied"}
            assert not second.engine.thinking("chatcmpl-both-2")
            assert first.engine.thinking("chatcmpl-both-1")
            assert (await refusal(end(one.target, "chatcmpl-both-2", local_only=True)))[0] is grpc.StatusCode.NOT_FOUND
            shown = await run("decisions", "--reason", "operator", "-o", "json", server=one.target)
            assert [d["engine_id"] for d in json.loads(shown.stdout)] == ["second"]


async def test_after_its_replica_is_killed_the_request_is_ended_where_the_engine_went(replicated: Replicated) -> None:
    one, two = await replicated.pair()
    with LinkedEngine([two.target, one.target], "moves") as moves:
        moves.open("a")
        await moves.steps_until(moves.caps)
        two.kill()
        await replicated.passes(LEASE_S + 1)
        codes = set()
        async with stepping(moves):
            while True:
                try:
                    answer = await end(one.target, "a", **WAIT)
                except grpc.aio.AioRpcError as error:
                    codes.add(error.code())
                    await asyncio.sleep(0.05)
                    continue
                if state(answer) != "NO_POLICY":
                    break
            assert codes <= {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.NOT_FOUND}
            assert state(answer) == "ENDING"
            await ended(one.target, "a")
        assert not moves.engine.thinking("a")
