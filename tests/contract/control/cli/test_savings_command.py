"""`meridianctl savings` against a server whose counts the test sets."""

import json
from typing import Any

from meridian.v1 import fleet_pb2

from meridian_control.capabilities.control_group.savings import estimate
from tests.contract.ctl import OK, Control, engine


def compared(**fields: Any) -> fleet_pb2.Savings:
    """Return counts of two arms of 100 requests, with the estimates that follow."""
    treated = fleet_pb2.ArmCounts(requests=100, think_tokens=6000, think_tokens_squares=400_000.0, answers=80)
    control = fleet_pb2.ArmCounts(requests=100, think_tokens=10_000, think_tokens_squares=1_100_000.0, aborts=3)
    counts = {"since_revision": 4, "in_force": True, "max_loss": 0.01, "shadow_saved_tokens": 3900, **fields}
    made = fleet_pb2.Savings(treated=treated, control=control, **counts)
    made.treated.answer_tokens = 800
    made.forced_ends.CopyFrom(fleet_pb2.EndCounts(ends=60, reentries=6, aborts=3))
    made.natural_ends.CopyFrom(fleet_pb2.EndCounts(ends=50, empty_answers=1))
    estimate(made)
    return made


async def test_savings(control: Control) -> None:
    acme = fleet_pb2.ShorteningHarm(kind="budget", name="acme", judged=90, judged_stops=50, harmful=9, unjudged=1)
    acme.evidence_ratio = 0.25
    acme.forced_ends.ends, acme.forced_ends.empty_answers, acme.natural_ends.lengths = 40, 4, 1
    row = compared(judged=100, judged_stops=60, harmful=2, kinds=[acme, fleet_pb2.ShorteningHarm(kind="cap")])
    control.fleet.savings = fleet_pb2.GetSavingsResponse(savings=[row], unreachable_replicas=["b"])
    result = await control("savings")
    assert result.exit_code == OK
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[0] == "current rules, since revision 4"
    assert lines[2:4] == [
        "treated 100 60.0 0.0 % 10.0 0.0 % 0.0 % 0.0 %",
        "control 100 100.0 0.0 % 0.0 % 3.0 % 0.0 %",
    ]
    assert lines[4] == "end requests re-entries answer empty aborted"
    assert lines[5:7] == ["forced, treated 60 10.0 % 0.0 % 5.0 %", "natural, control 50 0.0 % 2.0 % 0.0 %"]
    assert lines[7].startswith("shortened by judged would end harmful not judged harm")
    after = "40: 10.0 % empty, 0.0 % thought again, 0.0 % by length"
    assert lines[8] == f"budget acme 90 50 9 1 10.00 %, at most 16.80 %; allowed 1.00 % {after}"
    assert lines[9] == "the policy's cap 0 0 0 0 not measured: no request is judged yet"
    saved, own, harm, evidence = lines[10:]
    assert saved.startswith("saved: 40.0 % of the thinking (")
    assert "4,000 tokens in all (" in saved
    assert own == "shadow's own estimate: 39.0 % of the thinking"
    assert harm == "harm: 2.00 %, at most 6.16 %; allowed 1.00 % (2 of 100 requests)"
    assert evidence.startswith("evidence of more harm by budget acme: 0.25 ")
    assert result.stderr == "replicas that did not answer, so that their data is missing: b\n"
    as_json = json.loads((await control("savings", "-o", "json")).stdout)
    assert as_json["savings"][0]["harm_ratio"]["value"] == 0.02


async def test_savings_show_both_distributions_of_eat(control: Control) -> None:
    row = compared(judged=100, drift_evidence_ratio=0.5)
    for edge, calibrated, seen in ((0.1234, 20, 90), (1.0, 0, 0), (1.5, 60, 10)):
        row.eat_samples.add(max_nats=edge, calibrated=calibrated, seen=seen)
    row.rank_samples.add(max_value=2.0, calibrated=80)
    control.fleet.savings = fleet_pb2.GetSavingsResponse(savings=[row])
    result = await control("savings")
    lines = " ".join(result.stdout.split())
    # The last bin has all larger values, too.
    shares = (
        "90 % (calibrated 25 %) up to 0.1234, 0 % (calibrated 0 %) from 0.1234 to 1, 10 % (calibrated 75 %) above 1"
    )
    assert f"first EAT sample of 100 requests, in nats: {shares} first rank" in lines
    assert "first rank at a sentence end: no request yet evidence of drift: 0.5 of the level" in lines


async def test_savings_say_what_is_not_known(control: Control) -> None:
    result = await control("savings")
    assert result.stdout.startswith("no request counts: nothing in force shortens thinking")
    few = compared(unjudged=7, judged=3, judged_stops=0)
    few.ClearField("saved_tokens")
    few.treated.waiting_requests, few.control.waiting_requests = 11, 1
    control.fleet.savings = fleet_pb2.GetSavingsResponse(
        savings=[few], withdrawn_revision=9, withdrawn_reason="it did harm"
    )
    text = (await control("savings")).stdout
    assert text.startswith("revision 9 withdrew what did harm: it did harm\n")
    assert "saved: not known yet, because an arm has too few requests\n" in text
    assert "not counted yet: 12 requests, because others that began earlier still run\n" in text
    why = "no probe came where thinking would have ended (0 of 3 requests, 7 not judged for want of a probe)"
    assert f"harm: not measured: {why}" in text
    # Drift is no harm.
    drifted = "EAT has left the distribution that the rules of revision 3 were calibrated on: 9 of 9 requests"
    control.fleet.savings.withdrawn_reason, control.fleet.savings.withdrawn_cause = drifted, "drift"
    said = " ".join((await control("savings")).stdout.split())
    assert said.startswith(f"revision 9 put the entropy rules into shadow: {drifted} ")
    # Harm counts at once.
    few.treated.requests = few.control.requests = 0
    control.fleet.savings = fleet_pb2.GetSavingsResponse(savings=[few])
    text = (await control("savings")).stdout
    assert text.startswith("current rules, since revision 4\n")
    assert "not counted yet: 12 requests" in text
    assert "(0 of 3 requests, 7 not judged" in text


async def test_engines_say_that_rules_were_withdrawn(control: Control) -> None:
    control.fleet.engines = [engine("a", 1, withdrawn="it did harm"), engine("b", 1, withdrawn="it did harm")]
    text = (await control("engines")).stdout
    assert text.splitlines()[-1] == "a, b: the control plane has withdrawn what did harm: it did harm"


async def test_savings_show_what_self_calibration_has_found(control: Control) -> None:
    chat = fleet_pb2.SelfCalibration(
        model="m", slo_class="chat", state="in force", rule="EAT < 0.07 nats", max_loss=0.01
    )
    chat.recorded_requests, chat.proved_on_requests, chat.saved_ratio, chat.loss_bound = 40, 1500, 0.39, 0.0047
    batch = fleet_pb2.SelfCalibration(model="m", state="nothing is safe", why="it may lose 3 %", needed_requests=1472)
    batch.tried.add(requests=736, outcome="it may lose 3 %")
    control.fleet.self_calibrations.self_calibrations.extend([chat, batch])
    lines = [" ".join(line.split()) for line in (await control("savings")).stdout.splitlines()]
    assert "40 since then EAT < 0.07 nats saves 39.0 %; loses at most 0.47 % of the answers" in lines[1]
    assert "nothing is safe" in lines[2]
    assert "0 of 1,472 for the next attempt none none" in lines[2]
    assert lines[3] == "m: nothing is safe: it may lose 3 %"
    assert lines[4].endswith("on 736 requests: it may lose 3 %")
    as_json = json.loads((await control("savings", "-o", "json")).stdout)
    assert [row["state"] for row in as_json["self_calibrations"]] == ["in force", "nothing is safe"]
    control.fleet.refuses_self_calibrations = True
    assert (await control("savings")).stdout.startswith("no request counts"), "an older control plane"
