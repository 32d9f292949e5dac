"""Rollouts end to end: a real server over a real store, several agents on their real links, and a clock that the test
moves."""

from __future__ import annotations

import asyncio
import logging
import tomllib
from datetime import timedelta
from itertools import product
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from meridian.v1 import fleet_pb2, policy_pb2, rollout_pb2

from meridian_control.capabilities.budgets.fleet import BudgetSharing
from meridian_control.common.errors import StoreUnavailable
from meridian_control.engine.shortening import UNSHORTENED
from meridian_control.policy import directory as policy_dir
from meridian_control.policy.formats import parse_toml, to_proto
from meridian_control.rollout import driver
from meridian_control.telemetry.fleet_metrics import FleetCollector
from tests.contract.clients import OWN_CONNECTION, calling
from tests.contract.ctl import FAILED, INVALID, OK, ctl
from tests.contract.lost_store import lost_after
from tests.contract.rollouts import (
    ABORTED,
    ALL,
    CANARY,
    COMPLETED,
    NEW,
    PAUSED,
    RUNNING,
    Control,
    Engine,
    controlling,
    starting,
)
from tests.contract.streams import refusal
from tests.fakes.fleets import engines_of
from tests.fakes.linked import until
from tests.processes import BUSY

if TYPE_CHECKING:
    from pathlib import Path

    from meridian_control.rollout.state import Rollout
    from meridian_control.storage.database import Fence
    from tests.contract.control.app.test_server import Process


# ----------------------------------------------------------------------------------------------------- step by step


async def test_budgets_of_a_candidate_are_shown_on_every_replica(control: Control) -> None:
    """No engine of this replica has the candidate."""
    new = to_proto(parse_toml('[[budget]]\nname = "trial"\ntokens_per_day = 9'))
    await control.begin(CANARY, ALL, policy=new)
    await control.fleet.part(BudgetSharing).tick()
    rows = (await ctl(control, "budgets")).stdout.splitlines()
    assert [row.split()[:4] for row in rows[1:2]] == [["trial", "every", "request", "unshortened,"]]
    shown = dict(control.fleet.part(BudgetSharing).metrics(await control.fleet.totals()))
    assert shown["meridian_budget_stage"] == [(("trial",), UNSHORTENED)]


async def explained(control: Control, **fields: Any) -> tuple[int, str]:
    """Return the revision that is explained, and its lease."""
    answer = await control.policy.ExplainPolicy(policy_pb2.ExplainPolicyRequest(**fields))
    (lease,) = [row.value for row in answer.values if row.path == "fallback.lease_ms"]
    return answer.revision, lease


async def test_a_policy_reaches_the_fleet_step_by_step(control: Control) -> None:
    with Engine(control, "a", "canary-1") as a, Engine(control, "b", "main") as b:
        for engine in (a, b):
            await engine.has(1)
        made = await control.begin(CANARY, ALL, author="ann", reason="why")
        assert (made.rollout_id, made.state, made.step, made.candidate_revision) == (1, RUNNING, 1, 2)
        await a.has(2)
        with Engine(control, "new-a", "canary-2") as new_a, Engine(control, "new-b", "main") as new_b:
            await new_a.has(2)
            await new_b.has(1)
            assert [s.revision for s in new_a.settings] == [2], "a new engine gets its revision at once"
            assert (await control.ticks(2)).step == 1
            assert (await control.in_force()).revision == b.link.lease.revision == 1
            assert await explained(control) == await explained(control, engine_id="b") == (1, "5000")
            assert await explained(control, engine_id="a") == (2, "6000")
            assert await explained(control, engine_id="a", revision=1) == (1, "5000")
            a.open("asked")
            await a.steps_until(lambda: control.seen_step("a") > 1)
            assert await explained(control, request_id="asked") == (2, "6000")
            a.engine.finish("asked")
            found = await control.ticks(1)
            assert (found.step, found.state) == (2, RUNNING)
            assert (found.candidate_engines, found.other_engines) == (2, 2)
            for engine in (b, new_b):
                await engine.has(2)
            assert (await control.in_force()).revision == 1
            found = await control.ticks(2)
            assert found.state == COMPLETED
            assert [event.event for event in found.events] == ["started", "advanced", "completed"]
            current = await control.in_force()
            assert (current.revision, current.author, current.policy.fallback.lease_ms) == (2, "ann", 6000)
            await control.ticks(2)
            assert [s.revision for s in b.settings] == [1, 2], "no revision is sent twice"


async def test_an_engine_that_is_lost_is_waited_for_until_the_lease_is_over(control: Control) -> None:
    with Engine(control, "b", "main") as b, Engine(control, "a", "canary") as a:
        await b.has(1)
        await control.begin(CANARY, ALL)
        await a.has(2)
        await control.ticks(1)
        await a.lose()
        found = await control.ticks(6)
        assert (found.step, found.waiting_for) == (1, "1 engine to connect again")
        found = await control.ticks(6)
        # No guardrail keeps the rollout from going on, but nobody has tried the candidate.
        assert (found.step, found.waiting_for.partition(":")[0]) == (1, "an engine with the candidate")
        with Engine(control, "c", "canary") as c:
            await c.has(2)
            assert (await control.ticks(2)).step == 2


async def test_an_engine_that_has_shut_down_neither_delays_nor_ends_a_rollout(control: Control) -> None:
    with Engine(control, "b", "main") as b, Engine(control, "c", "canary") as c:
        with Engine(control, "a", "canary") as a:
            await b.has(1)
            await control.begin(CANARY, ALL, guardrails={"degraded_engines": 0})
            await a.has(2)
            await c.has(2)
        await until(lambda: control.fleet.departed)
        assert (await control.ticks(3)).step == 2
        await b.has(2)
        # The candidate's lease is 6 s.
        assert (await control.ticks(7)).state == COMPLETED


async def test_an_engine_whose_agent_is_off_is_not_waited_for(control: Control) -> None:
    off = Engine(control, "off", "main")
    off.said = {"fault": "KeyError"}
    with Engine(control, "a", "main") as a, off:
        await a.has(1)
        await until(lambda: len(list(control.fleet.connections)) == 2)
        await control.begin(ALL)
        await a.has(2)
        found = await control.ticks(4)
        assert (found.state, found.waiting_for, off.settings) == (COMPLETED, "", [])


async def test_the_policy_does_not_change_meanwhile(control: Control) -> None:
    await control.begin(CANARY)
    complaint = (grpc.StatusCode.FAILED_PRECONDITION, "rollout 1 is active: abort it, or wait until it ends")
    for validate_only in (True, False):
        update = policy_pb2.UpdatePolicyRequest(policy=to_proto(NEW), validate_only=validate_only)
        assert await refusal(control.policy.UpdatePolicy(update)) == complaint
        back = policy_pb2.RollbackPolicyRequest(revision=1, validate_only=validate_only)
        assert await refusal(control.policy.RollbackPolicy(back)) == complaint
        assert await refusal(control.stub.StartRollout(starting(ALL, validate_only=validate_only))) == complaint
    await control.abort()
    update = policy_pb2.UpdatePolicyRequest(policy=to_proto(NEW))
    assert (await control.policy.UpdatePolicy(update)).revision.revision == 4


async def test_pause_and_resume(control: Control) -> None:
    with Engine(control, "a", "canary") as a:
        await a.has(1)
        await control.begin(CANARY, ALL)
        await a.has(2)
        await control.ticks(2)
        request = rollout_pb2.PauseRolloutRequest(author="eve", reason="lunch", request_id="p")
        paused = (await control.stub.PauseRollout(request)).rollout
        assert (paused.state, paused.events[-1].author, paused.events[-1].reason) == (PAUSED, "eve", "lunch")
        assert (await control.ticks(20)).step == 1
        resumed = (await control.stub.ResumeRollout(rollout_pb2.ResumeRolloutRequest(etag=paused.etag))).rollout
        assert (await control.stub.PauseRollout(request)).rollout.state == resumed.state == RUNNING, "a repeated call"
        stale = 'etag is "1-2", but rollout 1 has the etag "1-3"; read it again'
        assert await refusal(control.abort(etag=paused.etag)) == (grpc.StatusCode.ABORTED, stale)
        assert (await control.ticks(3)).step == 2


async def test_abort(control: Control) -> None:
    with Engine(control, "a", "canary") as a, Engine(control, "b", "main") as b:
        await control.begin(CANARY, author="ann")
        await a.has(2)
        await b.has(1)
        aborted = await control.abort(author="eve")
        assert (aborted.state, aborted.rollback_revision) == (ABORTED, 3)
        for engine in (a, b):
            await engine.has(3)
            assert engine.settings[-1].lease_ms == 5000
        assert await control.abort(rollout_id=1) == aborted
        current = await control.in_force()
        assert (current.revision, current.author, current.reason) == (3, "eve", "rollout 1 aborted")
        over = (grpc.StatusCode.NOT_FOUND, "no rollout is active")
        assert await refusal(control.stub.PauseRollout(rollout_pb2.PauseRolloutRequest())) == over
        assert await refusal(control.stub.ResumeRollout(rollout_pb2.ResumeRolloutRequest())) == over
        assert await refusal(control.abort()) == over


# --------------------------------------------------------------------------------------------- restarts and replicas


async def test_a_restart_in_the_middle(control: Control) -> None:
    with Engine(control, "a", "canary") as a, Engine(control, "b", "main") as b:
        await control.begin(CANARY, ALL, guardrails={"nacks": 0})
        await a.has(2)
        await b.has(1)
        await control.ticks(2)
        # A canary that connects after the rollout has begun gets the new revision at once.
        known = [settings.revision for settings in a.settings]
        assert known in ([1, 2], [2])
        await control.kill()
        await until(lambda: not a.link.lease.connected and not b.link.lease.connected)
        await control.start()
        await until(lambda: a.link.lease.connected and b.link.lease.connected and len(a.settings) > len(known))
        assert ([settings.revision for settings in a.settings], b.link.lease.revision) == ([*known, 2], 1)
        found = await control.ticks(4)
        assert (found.step, found.state) == (2, RUNNING)
        await b.has(2)
        assert (await control.ticks(2)).state == COMPLETED


@pytest.mark.parametrize(("lease_s", "back_s"), [(6, 6), (86_400, 60)])
async def test_after_a_restart_no_step_ends_before_its_engines_are_back(
    control: Control, lease_s: int, back_s: int
) -> None:
    new = to_proto(parse_toml(f"fallback.lease_ms = {lease_s * 1000}"))
    with Engine(control, "a", "canary-1") as a, Engine(control, "b", "canary-2") as b:
        await control.begin({**CANARY, "bake_s": 8.0}, ALL, policy=new)
        await a.has(2)
        await b.has(2)
        assert (await control.ticks(8)).step == 1
        await control.kill()
    await control.start()
    with Engine(control, "a", "canary-1") as a:
        await a.has(2)
        assert (await control.ticks(back_s)).step == 1
        assert (await control.ticks(1)).step == 2


async def test_a_stored_change_is_acknowledged_and_found_by_the_next_tick_though_the_store_is_lost_then(
    control: Control,
) -> None:
    database = control.store.database
    with Engine(control, "a", "canary") as a:
        await a.has(1)
        await control.rollouts.tick()
        with lost_after(database, "INSERT INTO rollouts"):
            started = await control.stub.StartRollout(starting(CANARY))
            with pytest.raises(StoreUnavailable):
                await control.rollouts.tick()
        assert started.rollout.state == RUNNING
        assert [change.path for change in started.changes] == ["fallback.lease_ms", "engine.max_num_active_seqs"]
        assert await control.rollouts.tick()
        await a.has(2)
        with lost_after(database, "UPDATE rollouts"):
            assert (await control.abort()).state == ABORTED
        assert await control.rollouts.tick()
        await a.has(3)


async def test_so_is_a_change_that_is_stored_while_a_tick_reads_the_store(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    active, has_read, goes_on = control.rollouts.store.active, asyncio.Event(), asyncio.Event()

    async def slow() -> Rollout | None:
        read = await active()
        has_read.set()
        await goes_on.wait()
        return read

    with Engine(control, "a", "canary") as a:
        await a.has(1)
        monkeypatch.setattr(control.rollouts.store, "active", slow)
        tick = asyncio.create_task(control.rollouts.tick())
        await has_read.wait()
        monkeypatch.undo()
        with lost_after(control.store.database, "INSERT INTO rollouts"):
            assert (await control.begin(CANARY)).state == RUNNING
        goes_on.set()
        await tick
        assert await control.rollouts.tick()
        await a.has(2)


async def test_a_caller_who_is_faster_than_a_tick_delays_no_step(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, save = control.rollouts.store, control.rollouts.store.save

    async def late(rollout: Rollout, fence: Fence | None) -> Rollout | None:
        monkeypatch.undo()
        await control.stub.PauseRollout(rollout_pb2.PauseRolloutRequest())
        await control.stub.ResumeRollout(rollout_pb2.ResumeRolloutRequest())
        return await save(rollout, fence)

    with Engine(control, "a", "canary") as a:
        await control.begin(CANARY, ALL)
        await a.has(2)
        monkeypatch.setattr(store, "save", late)
        assert (await control.ticks(3)).step == 1
        found = await control.ticks(3)
        assert found.step == 2
        assert [event.event for event in found.events] == ["started", "paused", "resumed", "advanced"]


async def test_an_engine_whose_labels_change_keeps_what_it_has(control: Control) -> None:
    with Engine(control, "a", "canary") as a:
        await control.begin(CANARY)
        await a.has(2)
        a.labels = {"pool": "main"}
        a.link.restart()
        await until(lambda: len(a.settings) >= 2 and a.link.lease.connected)
        assert a.settings[-1].revision == 2


async def test_two_replicas(postgres_address: str) -> None:
    """One replica drives the rollout and the engines of both replicas follow; then the other replica drives it to its
    end."""
    async with controlling(postgres_address) as one, controlling(postgres_address, leads=False) as two:
        with Engine(one, "a", "main") as a, Engine(two, "b", "canary") as b, Engine(two, "c", "main") as c:
            # In a real fleet another module lists the engines of all replicas.
            async def engines() -> list[fleet_pb2.Engine]:
                return [*engines_of(one.fleet), *engines_of(two.fleet)]

            one.rollouts.engines = two.rollouts.engines = engines
            for engine in (a, b, c):
                await engine.has(1)
            await one.begin(CANARY, {"percent": 0.0, "bake_s": 2.0}, ALL)
            await b.has(2)
            assert (await two.ticks(20)).step == 1, "a replica that does not lead drives no rollout"
            assert (await one.ticks(3)).step == 2
            one.leads, two.leads = False, True
            two.now = one.now
            found = await two.ticks(6)
            assert (found.step, found.waiting_for) == (2, "any engines to connect again")
            assert (await two.ticks(1)).step == 3
            for engine in (a, b, c):
                await engine.has(2)
            assert (await two.ticks(2)).state == (await one.ticks(1)).state == COMPLETED
            await two.begin(CANARY, ALL, guardrails={"nacks": 0})
            await b.has(3)
            await one.abort()
            for engine in (a, b, c):
                await engine.has(4)


async def test_the_leader_asks_for_engines_only_during_a_rollout(control: Control) -> None:
    """The driver neither begins nor credits time to a step before it knows all engines."""
    told: list[fleet_pb2.Engine] | None = None
    asked = 0

    async def engines() -> list[fleet_pb2.Engine] | None:
        nonlocal asked
        asked += 1
        return told

    control.rollouts.engines = engines
    with Engine(control, "a", "canary") as a:
        await a.has(1)
        await control.rollouts.tick()
        assert asked == 0
        await control.begin({**CANARY, "bake_s": 2.0}, ALL)
        await a.has(2)
        assert (await control.ticks(5)).step == 1
        assert asked == 5
        told = engines_of(control.fleet)
        assert (await control.ticks(1)).step == 1
        assert (await control.ticks(2)).step == 2


async def test_a_fault_that_lasts_is_logged_once(
    control: Control, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Most ticks without a rollout do not read the store, so they do not tell that the fault is over."""
    reads, enough = 0, asyncio.Event()

    async def away() -> None:
        nonlocal reads
        reads += 1
        if reads == 3:
            enough.set()
        raise StoreUnavailable("policy store: away")

    monkeypatch.setattr(control.rollouts.store, "active", away)
    monkeypatch.setattr(driver, "TICK_S", 0.0)
    driving = asyncio.create_task(control.rollouts.drive())
    await asyncio.wait_for(enough.wait(), 10 * BUSY)
    driving.cancel()
    assert caplog.messages.count("rollouts do not proceed: policy store: away") == 1


async def test_the_age_of_a_rollout_needs_no_other_clock(control: Control) -> None:
    """Prometheus goes by another clock than the control plane, whose clock is months from the machine's here."""
    await control.begin(CANARY, ALL)
    control.now += timedelta(seconds=7)
    loop = asyncio.get_running_loop()
    collector = FleetCollector(control.fleet, lambda: True, lambda: control.rollouts.newest, {}, loop)
    families = await asyncio.to_thread(lambda: {family.name: family for family in collector.collect()})
    assert [sample.value for sample in families["meridian_rollout_age_seconds"].samples] == [7]


async def test_the_program_drives_a_rollout_although_it_is_killed(own: Process) -> None:
    await own.started()
    with Engine(own, "a", "canary") as a, Engine(own, "b", "main") as b:
        await a.has(1)
        await b.has(1)
        async with calling(own.target) as clients:
            await clients.rollout.StartRollout(starting(CANARY, {**ALL, "bake_s": 1.0}))
        await a.has(2)
        own.kill()
        await own.started()
        await b.has(2)
        async with calling(own.target, OWN_CONNECTION) as clients, asyncio.timeout(120):
            asked = rollout_pb2.GetRolloutRequest()
            while (await clients.rollout.GetRollout(asked, wait_for_ready=True)).rollout.state != COMPLETED:
                await asyncio.sleep(0.1)
        assert (a.settings[-1].revision, b.settings[-1].revision) == (2, 2)
    assert await own.terminate() == 0
    assert "Traceback" not in own.log()


async def test_a_directory_waits_for_the_end(
    control: Control, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_dir, "POLL_MS", 200)
    folder = tmp_path / "mounted"
    folder.mkdir()
    (folder / "meridian.toml").write_text("fallback.lease_ms = 7000")
    await control.begin(ALL)
    directory = policy_dir.PolicyDirectory(folder, control.store, control.fleet.set_policy, control.clock)
    assert (await directory.put_in_force()).revision == 1, "the directory can be opened while a rollout is active"
    watching = asyncio.create_task(directory.watch())

    def complaints() -> list[str]:
        return [r.message for r in caplog.records if r.levelno == logging.ERROR and "active" in r.message]

    await until(complaints)
    # Later polls of the directory log no further error.
    await asyncio.sleep(0.5)
    await control.abort()
    while (await control.in_force()).policy.fallback.lease_ms != 7000:
        await asyncio.sleep(0.02)
    watching.cancel()
    assert complaints() == [
        f"{folder / 'meridian.toml'} is not put in force: rollout 1 is active: abort it, or wait until it ends"
    ]


# ------------------------------------------------------------------------------------------------------------ requests


async def test_a_checked_start(control: Control) -> None:
    checked = await control.stub.StartRollout(starting(CANARY, author="ann", validate_only=True))
    changes = [(c.path, c.before, c.after) for c in checked.changes]
    assert changes == [("fallback.lease_ms", "5000", "6000"), ("engine.max_num_active_seqs", "0", "2")]
    assert (checked.rollout.rollout_id, checked.rollout.stable_revision, checked.rollout.author) == (0, 1, "ann")
    assert (await refusal(control.get()))[0] is grpc.StatusCode.NOT_FOUND
    assert (await refusal(control.begin(CANARY, etag="stale")))[0] is grpc.StatusCode.ABORTED
    done = await control.stub.StartRollout(starting(CANARY, author="ann", request_id="a"))
    assert done.changes == checked.changes
    assert await control.stub.StartRollout(starting(CANARY, author="ann", request_id="a", etag="stale")) == done


BAD: list[tuple[Any, str]] = [
    (rollout_pb2.StartRolloutRequest(), "policy must be set"),
    (rollout_pb2.StartRolloutRequest(policy=policy_pb2.Policy()), "plan must be set"),
    (starting(), "step must have 1 to 32 entries; got []"),
    (starting(ALL, guardrails={"reentry_rate": -1.0}), "guardrails.reentry_rate must be >= 0; got -1.0"),
    (starting(ALL, author="\0"), "author must not contain the character U+0000"),
    (starting(ALL, request_id="x" * 129), "request_id must have at most 128 characters; got 129"),
]


async def test_starts_that_are_refused(control: Control) -> None:
    for (request_, complaint), validate_only in product(BAD, (True, False)):
        request_.validate_only = validate_only
        refused = await refusal(control.stub.StartRollout(request_))
        assert refused == (grpc.StatusCode.INVALID_ARGUMENT, complaint)
    assert (await control.in_force()).revision == 1


async def test_list(control: Control) -> None:
    for number in range(3):
        await control.begin(ALL, reason=f"n{number}")
        await control.abort()
    first = await control.stub.ListRollouts(rollout_pb2.ListRolloutsRequest(page_size=2))
    rest = await control.stub.ListRollouts(rollout_pb2.ListRolloutsRequest(page_token=first.next_page_token))
    assert [r.reason for r in (*first.rollouts, *rest.rollouts)] == ["n2", "n1", "n0"]
    assert (first.next_page_token, rest.next_page_token) == ("2", "")
    assert (await control.get()).rollout_id == 3
    assert (await control.get(2)).reason == "n1"


# -------------------------------------------------------------------------------------------------------- meridianctl


async def test_meridianctl(control: Control, tmp_path: Path) -> None:
    policy, steps = tmp_path / "policy.toml", tmp_path / "steps.toml"
    policy.write_text("fallback.lease_ms = 6000")
    steps.write_text('[[step]]\nengine_labels = {pool = "canary*"}\n[[step]]\npercent = 25\n[guardrails]\nnacks = 2')

    async def rollout(*arguments: object) -> Any:
        return await ctl(control, "rollout", *arguments)

    checked = await rollout("start", "-f", policy, "--steps", steps, "--dry-run", "--diff")
    assert checked.stdout.endswith(f"{policy} and {steps}: valid, nothing started\n")
    assert "fallback.lease_ms" in checked.stdout
    started = await rollout("start", "-f", policy, "--steps", steps, "--reason", "why")
    assert started.exit_code == OK
    assert [line.split() for line in started.stdout.splitlines()[:3]] == [
        ["rollout", "1"],
        ["state", "running"],
        ["revisions", "1", "→", "2"],
    ]
    await control.ticks(6)
    shown = await rollout("status")
    lines = [line.split() for line in shown.stdout.splitlines()]
    assert ["waits", "for", "an", "engine", "to", "connect"] in lines
    assert ["1", "100", "%", "of", "pool=canary*", "600", "5", "s"] in lines
    assert ["2", "25", "%", "600"] in lines
    assert ["nacks", "0", "2", "0"] in lines
    for command, state in (("pause", "paused"), ("resume", "running"), ("abort", "aborted")):
        done = await rollout(command, "--reason", "so")
        assert (done.exit_code, done.stdout.splitlines()[1].split()) == (OK, ["state", state])
        assert ("waits for" in done.stdout) == (command != "abort"), "a rollout that has ended waits for nothing"
    waited = await rollout("status", 1, "--wait", "-o", "json")
    assert (waited.exit_code, waited.stderr) == (FAILED, "rollout 1 is aborted\n")
    assert '"state": "ROLLOUT_STATE_ABORTED"' in waited.stdout
    as_toml = tomllib.loads((await rollout("status", 1, "-o", "toml")).stdout)
    assert (as_toml["state"], as_toml["plan"]["step"][1]["percent"]) == ("ROLLOUT_STATE_ABORTED", 25)
    listed = await rollout("list")
    assert listed.stdout.splitlines()[1].split()[:6] == ["1", "aborted", "1", "of", "2", "2"]
    again = await rollout("abort")
    assert (again.exit_code, again.stderr) == (FAILED, "NOT_FOUND: no rollout is active\n")
    both = await rollout("start", "-f", "-", "--steps", "-")
    assert (both.exit_code, both.stderr) == (INVALID, "--file and --steps must not both be standard input\n")
    steps.write_text("[[step]]\npercent = 101\n")
    bad = await rollout("start", "-f", policy, "--steps", steps)
    assert (bad.exit_code, bad.stderr) == (INVALID, f"{steps}:2: step[0].percent must be in [0, 100]; got 101\n")


async def test_an_empty_file_starts_no_rollout(control: Control, tmp_path: Path) -> None:
    """A pipe whose first program fails must not roll out the defaults."""
    policy, steps = tmp_path / "policy.toml", tmp_path / "steps.toml"
    policy.write_text("# nothing\n")
    steps.write_text("[[step]]\npercent = 100\n")
    for file in (policy, "-"):
        refused = await ctl(control, "rollout", "start", "-f", file, "--steps", steps)
        assert refused.exit_code == INVALID
        assert refused.stderr.startswith(f"{file}: has no fields; a section's header alone")
    assert (await ctl(control, "rollout", "list")).stdout == "no rollout has been started\n"


async def test_the_author_hears_of_a_step_without_engines_and_it_waits(control: Control, tmp_path: Path) -> None:
    """A percentage of one engine selects none. The rollout does not pass that step, whatever the guardrails say."""
    policy, steps = tmp_path / "policy.toml", tmp_path / "steps.toml"
    policy.write_text("fallback.lease_ms = 6000")
    steps.write_text(
        "[[step]]\npercent = 0.0001\nbake_s = 2\n[[step]]\npercent = 100\n[guardrails]\noutput_itl_p99_ms = 9"
    )
    command = ("rollout", "start", "-f", policy, "--steps", steps)
    nobody = await ctl(control, *command, "--dry-run")
    assert nobody.stderr == "warning: no engine is connected: the rollout waits until one connects\n"
    with Engine(control, "a", "main") as a:
        await a.has(1)
        for more in (("--dry-run",), ()):
            warned = await ctl(control, *command, *more)
            assert (warned.exit_code, warned.stderr) == (
                OK,
                "warning: step 1 selects none of the 1 connected engines (0.0001 % of the engines, by a hash of their "
                "ids): it waits until an engine that it selects connects\n",
            )
        found = await control.ticks(20)
        assert (found.step, found.candidate_engines, found.other_engines) == (1, 0, 1)
        assert found.waiting_for.startswith(
            "an engine with the candidate: step 1 selects none of the 1 connected engines"
        )
        shown = (await ctl(control, "rollout", "status")).stdout
        assert ["output_itl_p99_ms", "9", "0", "not", "measured"] in [line.split() for line in shown.splitlines()]
