"""meridianctl against a real server: PolicyService over a real store, and a FleetService whose fleet the test sets."""

import asyncio
import json
import os
import signal
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from meridian.v1 import agent_pb2, fleet_pb2, fleet_pb2_grpc, policy_pb2, policy_pb2_grpc
from typer.testing import CliRunner, Result

from meridian_control.cli.console import error_lines
from meridian_control.cli.main import app
from meridian_control.common.errors import NotFound
from meridian_control.fleet import spills
from meridian_control.fleet.savings import estimate
from meridian_control.policy.diff import Subject
from meridian_control.policy.formats import parse_toml
from meridian_control.policy.model import Who
from meridian_control.policy.model_families import model_families
from meridian_control.policy.store import PolicyStore
from meridian_control.server.policy_service import PolicyService
from meridian_control.session.arms import Ends
from meridian_control.storage.database import Database
from tests.contract.gated import gated
from tests.processes import MERIDIANCTL

NOW = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)
CONNECTED = fleet_pb2.CONNECTION_STATE_CONNECTED
OK, FAILED, INVALID, UNREACHABLE = range(4)


class FakeFleet(fleet_pb2_grpc.FleetServiceServicer):
    """A FleetService that serves the engines and requests which the test sets, one entry per page."""

    def __init__(self) -> None:
        self.engines: list[fleet_pb2.Engine] = []
        self.requests: list[fleet_pb2.LiveRequest] = []
        self.unreachable: list[str] = []
        self.savings = fleet_pb2.GetSavingsResponse()
        self.watch_ends = False
        # The records that a recording gets, and the status with which the recording then ends; None leaves its stream
        # open.
        self.records: list[fleet_pb2.TraceRecord] = []
        self.end = fleet_pb2.EndThinkingResponse()
        self.records_end: grpc.StatusCode | None = None

    async def ListEngines(self, request: fleet_pb2.ListEnginesRequest, context: Any) -> fleet_pb2.ListEnginesResponse:  # noqa: N802
        page, token = one_page(self.engines, request.page_token)
        return fleet_pb2.ListEnginesResponse(engines=page, next_page_token=token, unreachable_replicas=self.unreachable)

    async def ListRequests(  # noqa: N802
        self, request: fleet_pb2.ListRequestsRequest, context: Any
    ) -> fleet_pb2.ListRequestsResponse:
        found = [live for live in self.requests if request.engine_id in ("", live.engine_id)]
        page, token = one_page(found, request.page_token)
        return fleet_pb2.ListRequestsResponse(
            requests=page, next_page_token=token, unreachable_replicas=self.unreachable
        )

    async def WatchFleet(  # noqa: N802
        self, request: fleet_pb2.WatchFleetRequest, context: Any
    ) -> AsyncIterator[fleet_pb2.WatchFleetResponse]:
        while not self.watch_ends:
            yield fleet_pb2.WatchFleetResponse(engines=self.engines, requests=self.requests)
            await asyncio.sleep(request.interval_ms / 1000)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "going away")

    async def ExplainRequest(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError

    async def ListDecisions(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError

    async def GetSavings(self, request: Any, context: Any) -> fleet_pb2.GetSavingsResponse:  # noqa: N802
        return self.savings

    async def EndThinking(  # noqa: N802
        self, request: fleet_pb2.EndThinkingRequest, context: Any
    ) -> fleet_pb2.EndThinkingResponse:
        return self.end

    async def RecordTrace(  # noqa: N802
        self, request: fleet_pb2.RecordTraceRequest, context: Any
    ) -> AsyncIterator[fleet_pb2.RecordTraceResponse]:
        for record in self.records:
            if request.engine_id in ("", record.engine_id):
                yield fleet_pb2.RecordTraceResponse(record=record)
        if self.records_end is not None:
            await context.abort(self.records_end, "the end")
        await asyncio.Event().wait()


def one_page(entries: list[Any], token: str) -> tuple[list[Any], str]:
    index = int(token or 0)
    return entries[index : index + 1], str(index + 1) if index + 1 < len(entries) else ""


@dataclass
class Control:
    address: str
    fleet: FakeFleet

    async def __call__(self, *arguments: object) -> Result:
        return await run(*arguments, server=self.address)


async def run(*arguments: object, server: str) -> Result:
    """Run the command line on a thread, so that the server's event loop goes on."""
    environment = {"MERIDIAN_SERVER": server, "USER": "ann", "NO_COLOR": "1"}
    command = [str(argument) for argument in arguments]
    result = await asyncio.to_thread(CliRunner().invoke, app, command, env=environment)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


def subject(engine_id: str, request_id: str) -> Subject:
    if engine_id != "e":
        raise NotFound(f'no engine "{engine_id}" is connected')
    return Subject(Who("m", engine_labels={"zone": "a"}), "m")


@pytest.fixture
async def control(tmp_path: Path) -> AsyncIterator[Control]:
    store = PolicyStore(await Database.open(f"sqlite+aiosqlite:///{tmp_path / 'policy.db'}"))
    fleet = FakeFleet()
    async with gated(store.database) as (server, target):
        service = PolicyService(store, lambda: NOW, lambda _: None, subject)
        policy_pb2_grpc.add_PolicyServiceServicer_to_server(service, server)
        fleet_pb2_grpc.add_FleetServiceServicer_to_server(fleet, server)
        await server.start()
        yield Control(target, fleet)
    await store.database.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "meridian.toml"
    path.write_text("fallback.lease_ms = 500\n")
    return path


def engine(name: str, acked: int, **fields: Any) -> fleet_pb2.Engine:
    return fleet_pb2.Engine(**{"engine_id": name, "state": CONNECTED, "revision": 1, "acked_revision": acked, **fields})


# ------------------------------------------------------------------------------------------------------------ policy


async def test_apply_then_get(control: Control, file: Path) -> None:
    applied = await control("policy", "apply", "-f", file, "--reason", "two\nlines")
    assert applied.exit_code == OK
    word, revision, etag_word, etag = applied.stdout.split()
    assert (word, revision, etag_word) == ("revision", "1", "etag")

    as_toml = await control("policy", "get")
    assert parse_toml(as_toml.stdout).fallback.lease_ms == 500
    note = json.loads(as_toml.stdout.splitlines()[0].removeprefix("# "))
    assert note == {"revision": 1, "etag": etag, "author": "ann", "reason": "two\nlines"}

    as_json = json.loads((await control("policy", "get", "-o", "json")).stdout)
    assert (as_json["etag"], as_json["policy"]["fallback"]["lease_ms"]) == (etag, 500)


async def test_get_what_was_got_can_be_applied(control: Control, file: Path) -> None:
    await control("policy", "apply", "-f", file)
    file.write_text((await control("policy", "get")).stdout)
    assert (await control("policy", "apply", "-f", file)).stdout.startswith("revision 2 ")


async def test_get_before_anything_is_stored(control: Control) -> None:
    result = await control("policy", "get")
    assert (result.exit_code, result.stdout) == (FAILED, "")
    assert result.stderr == "NOT_FOUND: no policy is stored yet\n"


async def test_dry_run_changes_nothing(control: Control, file: Path) -> None:
    result = await control("policy", "apply", "-f", file, "--dry-run")
    assert (result.exit_code, result.stdout) == (OK, f"{file}: valid, nothing changed\n")
    assert (await control("policy", "get")).exit_code == FAILED


async def test_etag(control: Control, file: Path) -> None:
    await control("policy", "apply", "-f", file)
    stale = await control("policy", "apply", "-f", file, "--etag", "stale")
    assert stale.exit_code == FAILED
    assert stale.stderr.startswith('ABORTED: etag is "stale", but the policy in force has ')
    assert (await control("policy", "apply", "-f", file, "--etag", "")).stdout.startswith("revision 2 ")


@pytest.mark.parametrize("command", ["validate", "apply"])
async def test_invalid_file_prints_every_line(control: Control, file: Path, command: str) -> None:
    file.write_text("entropy.ema_alpha = 1.5\nentropy.ema_alfa = 1\n")
    result = await control("policy", command, "-f", file)
    assert (result.exit_code, result.stdout) == (INVALID, "")
    assert result.stderr.splitlines() == [
        "entropy.ema_alpha must be in (0, 1]; got 1.5",
        "entropy.ema_alfa is not a known key",
    ]


async def test_a_familys_settings_go_into_a_policy(control: Control, file: Path) -> None:
    listed = (await run("policy", "families", server="127.0.0.1:1")).stdout
    rows = {line.split()[0]: line for line in listed.splitlines()[1:]}
    assert list(rows) == list(model_families())
    assert r'"\n\nConsidering the limited time by the user, ' in rows["qwen3"]
    one = await control("policy", "families", "qwen3", "--model", "Qwen/Qwen3-8B")
    assert one.exit_code == OK
    assert "# Closing text: the authors' early_stopping_text, QwenLM/Qwen3 " in one.stdout
    file.write_text("scheduler.max_think_tokens = 900\n" + one.stdout)
    assert (await control("policy", "apply", "-f", file, "--etag", "")).exit_code == OK
    stored = parse_toml((await control("policy", "get")).stdout)
    assert stored.model == {"Qwen/Qwen3-8B": model_families()["qwen3"].settings}
    unknown = await run("policy", "families", "nobody", server="127.0.0.1:1")
    assert (unknown.exit_code, unknown.stdout) == (INVALID, "")
    assert unknown.stderr.startswith("FAMILY must be one of qwen3, ")
    assert unknown.stderr.endswith("; got nobody\n")


async def test_validate_needs_no_server(file: Path) -> None:
    result = await run("policy", "validate", "-f", file, server="127.0.0.1:1")
    assert (result.exit_code, result.stdout) == (OK, f"{file}: valid\n")


async def test_missing_file(control: Control, tmp_path: Path) -> None:
    result = await control("policy", "apply", "-f", tmp_path / "no.toml")
    assert result.exit_code == INVALID
    assert result.stderr == f"{tmp_path / 'no.toml'}: cannot be read: No such file or directory\n"


async def test_violations_from_the_server_print_one_line_each(control: Control) -> None:
    policy = policy_pb2.Policy()
    policy.entropy.ema_alpha = 1.5
    policy.fallback.lease_ms = 1
    request = policy_pb2.UpdatePolicyRequest(policy=policy)
    async with grpc.aio.insecure_channel(control.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await policy_pb2_grpc.PolicyServiceStub(channel).UpdatePolicy(request)
    assert error_lines(caught.value) == [
        "entropy.ema_alpha must be in (0, 1]; got 1.5",
        "fallback.lease_ms must be in [100, 86400000]; got 1",
    ]


@pytest.mark.parametrize("command", [("policy", "get"), ("engines",), ("requests",), ("wait",)])
async def test_unreachable(command: tuple[str, ...]) -> None:
    result = await run(*command, server="127.0.0.1:1")
    assert (result.exit_code, result.stdout.strip()) == (UNREACHABLE, "")
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("UNAVAILABLE: ")


async def test_usage_error(control: Control) -> None:
    assert (await control("policy", "apply")).exit_code == INVALID
    assert (await control("engines", "-o", "xml")).exit_code == INVALID


async def applied(control: Control, file: Path, text: str, *options: object) -> Result:
    file.write_text(text)
    return await control("policy", "apply", "-f", file, *options)


def rows(result: Result) -> list[list[str]]:
    """Return the cells of a printed table, in which no cell contains a space."""
    assert result.exit_code == OK
    return [line.split() for line in result.stdout.splitlines()]


async def test_get_an_older_revision(control: Control, file: Path) -> None:
    await control("policy", "apply", "-f", file)
    await applied(control, file, "")
    assert parse_toml((await control("policy", "get", "--revision", 1)).stdout).fallback.lease_ms == 500
    assert rows(await control("policy", "get", "--revision", 1, "-o", "table"))[1:] == [
        ["fallback.lease_ms", "500", "30000"]
    ]
    missing = await control("policy", "get", "--revision", 7)
    assert (missing.exit_code, missing.stderr) == (FAILED, "NOT_FOUND: policy revision 7 is not stored\n")


async def test_apply_shows_what_changes(control: Control, file: Path) -> None:
    change = ["fallback.lease_ms", "30000", "500"]
    checked = await control("policy", "apply", "-f", file, "--dry-run", "--diff")
    assert rows(checked)[:2] == [["field", "before", "after"], change]
    assert checked.stdout.endswith(f"{file}: valid, nothing changed\n")
    done = await control("policy", "apply", "-f", file, "--diff")
    assert rows(done)[1] == change
    assert "\nrevision 1 etag " in done.stdout


async def test_apply_again_with_the_same_request_id(control: Control, file: Path) -> None:
    first = await control("policy", "apply", "-f", file, "--request-id", "a")
    again = await control("policy", "apply", "-f", file, "--request-id", "a")
    assert first.stdout == again.stdout
    other = await applied(control, file, "", "--request-id", "a")
    assert other.exit_code == INVALID
    assert other.stderr.startswith('request_id must be a new one; got "a"')


async def test_history(control: Control, file: Path) -> None:
    for number in range(3):
        await control("policy", "apply", "-f", file, "--author", f"a{number}", "--reason", "why")
    heading, *shown = rows(await control("policy", "history"))
    assert heading == ["revision", "time", "author", "reason", "etag"]
    assert [row[:4] for row in shown] == [[str(n + 1), "2026-05-04T03:02:01Z", f"a{n}", "why"] for n in (2, 1, 0)]
    listed = json.loads((await control("policy", "history", "--limit", 2, "-o", "json")).stdout)
    assert [revision["revision"] for revision in listed] == ["3", "2"]


async def test_diff(control: Control, file: Path) -> None:
    await control("policy", "apply", "-f", file)
    await applied(control, file, "")
    assert rows(await control("policy", "diff", 1, 2))[1:] == [["fallback.lease_ms", "500", "30000"]]
    listed = json.loads((await control("policy", "diff", "-o", "json")).stdout)
    assert listed == [{"path": "fallback.lease_ms", "before": "500", "after": "30000"}]
    assert (await control("policy", "diff", 0, 1)).stdout.split()[:4] == ["field", "defaults", "revision", "1"]


async def test_rollback(control: Control, file: Path) -> None:
    await control("policy", "apply", "-f", file)
    await applied(control, file, "")
    checked = await control("policy", "rollback", 1, "--dry-run", "--diff")
    assert rows(checked)[1] == ["fallback.lease_ms", "30000", "500"]
    assert checked.stdout.endswith("revision 1: valid, nothing changed\n")
    assert (await control("policy", "rollback", 1)).stdout.startswith("revision 3 etag ")
    assert json.loads((await control("policy", "get")).stdout.splitlines()[0][2:])["reason"] == "rollback to revision 1"
    stale = await control("policy", "rollback", 1, "--etag", "stale")
    assert (stale.exit_code, stale.stderr[:8]) == (FAILED, "ABORTED:")


async def test_explain(control: Control, file: Path) -> None:
    text = """
        [[override]]
        tenant = "acme"
        engine_labels = {zone = "a"}
        scheduler.max_think_tokens = 100
        [[override]]
        model = "m"
        entropy.rank_conditions = [{max_ranks = [5, 7]}]
    """
    assert (await applied(control, file, text)).exit_code == OK
    cap = "scheduler.max_think_tokens"
    by_label = rows(await control("policy", "explain", "--tenant", "acme", "--label", "zone=a"))
    assert [cap, "100", "override[0]"] in by_label
    by_engine = await control("policy", "explain", "--engine", "e", "--tenant", "acme", "-o", "toml")
    assert f"{cap} = 100  # override[0]\n" in by_engine.stdout
    holds = parse_toml(by_engine.stdout)
    assert holds.entropy.rank_conditions[0].max_ranks == (5, 7)
    assert holds.scheduler.max_think_tokens == 100
    plain = json.loads((await control("policy", "explain", "-o", "json")).stdout)
    assert {"path": cap, "value": "32768", "origin": "default"} in plain
    missing = await control("policy", "explain", "--engine", "x")
    assert (missing.exit_code, missing.stderr) == (FAILED, 'NOT_FOUND: no engine "x" is connected\n')
    bad = await control("policy", "explain", "--label", "zone")
    assert (bad.exit_code, bad.stderr) == (INVALID, "--label must be NAME=VALUE; got zone\n")


# ---------------------------------------------------------------------------------------------------------- contexts


@pytest.fixture
def contexts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "contexts.toml"
    monkeypatch.setenv("MERIDIAN_CONTEXTS", str(path))
    monkeypatch.delenv("MERIDIAN_CONTEXT", raising=False)
    return path


async def test_where_the_address_comes_from(
    control: Control, file: Path, contexts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command line goes before the environment, the environment before the file, and an address before a context's
    name."""
    nowhere = "127.0.0.1:1"
    contexts.write_text(
        f'current = "here"\n[contexts.here]\nserver = "{control.address}"\n[contexts.gone]\nserver = "{nowhere}"'
    )
    await control("policy", "apply", "-f", file)

    async def reached(*options: object, server: str = "") -> bool:
        result = await run(*options, "policy", "get", server=server)
        assert result.exit_code in (OK, UNREACHABLE)
        return result.exit_code == OK

    assert await reached()
    assert not await reached(server=nowhere)
    assert await reached("--context", "here", server=nowhere)
    assert await reached("--server", control.address, "--context", "gone", server=nowhere)
    assert not await reached("--context", "gone")
    monkeypatch.setenv("MERIDIAN_CONTEXT", "gone")
    assert not await reached()
    assert await reached(server=control.address)
    assert await reached("--context", "here")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('current = "a"', 'has no context "a"; known contexts: none'),
        (
            'current = "a"\n[contexts.c]\nserver = ""\n[contexts.b]\nserver = ""',
            'has no context "a"; known contexts: b, c',
        ),
        ("[contexts.a]\nhost = 1", "contexts.a.server: Field required"),
        ("[contexts.a", "Expected ']' at the end of a table declaration (at end of document)"),
    ],
)
async def test_a_context_file_that_cannot_be_used(contexts: Path, text: str, complaint: str) -> None:
    contexts.write_text(text)
    result = await run("engines", server="")
    assert (result.exit_code, result.stderr) == (INVALID, f"{contexts}: {complaint}\n")
    assert (await run("--server", "127.0.0.1:1", "engines", server="")).exit_code == UNREACHABLE


# ------------------------------------------------------------------------------------------------------------- fleet


async def test_engines(control: Control) -> None:
    control.fleet.engines = [engine("a[b]", 1, kv_used=0.25), engine("b", 0, nack_error="no", fault="tripped")]
    listed = json.loads((await control("engines", "-o", "json")).stdout)
    assert [(e["engine_id"], e["acked_revision"], e["kv_used"]) for e in listed] == [("a[b]", "1", 0.25), ("b", "0", 0)]
    first, second, reason = (await control("engines")).stdout.splitlines()[1:]
    assert reason.startswith("b refused revision ")
    assert reason.endswith(": no")
    assert first.split()[:2] == ["a[b]", "connected"]
    assert "25%" in first
    assert "fault: tripped" in second
    assert "0/1 refused" in second
    control.fleet.engines = [engine("c", 1, unknown_markers="started without --reasoning-parser")]
    *_, missing = (await control("engines")).stdout.splitlines()
    assert missing == "c does not know its thinking markers: started without --reasoning-parser"


async def test_engines_say_what_measures_entropy(control: Control) -> None:
    torch, none = agent_pb2.ENTROPY_BACKEND_TORCH, agent_pb2.ENTROPY_BACKEND_NONE
    control.fleet.engines = [
        engine("a", 1, entropy_backend=torch, entropy_note="CuPy is not installed"),
        engine("b", 1, entropy_backend=none, entropy_note="there are no entropy kernels for xpu"),
        engine("c", 1, entropy_backend=agent_pb2.ENTROPY_BACKEND_CUDA),
        engine("d", 1),
    ]
    said = (await control("engines")).stdout
    assert "torch, slower" in " ".join(said.split())
    assert "a measures entropy with torch: CuPy is not installed" in said.splitlines()
    assert "b measures entropy with none: there are no entropy kernels for xpu" in said.splitlines()
    assert sum("measures entropy" in line for line in said.splitlines()) == 2
    listed = json.loads((await control("engines", "-o", "json")).stdout)
    assert [e["entropy_backend"].rpartition("_")[2] for e in listed] == ["TORCH", "NONE", "CUDA", "UNSPECIFIED"]


async def test_requests(control: Control) -> None:
    last = fleet_pb2.LastDecision(decision_id=1, kind="force", reason="eat", outcome=agent_pb2.OUTCOME_APPLIED)
    control.fleet.requests = [
        fleet_pb2.LiveRequest(engine_id="a", request_id="r1", phase=agent_pb2.PHASE_THINK, entropy_nats=float("nan")),
        fleet_pb2.LiveRequest(engine_id="b", request_id="r2", phase=agent_pb2.PHASE_OUTPUT, last_decision=last),
    ]
    listed = json.loads((await control("requests", "-o", "json")).stdout)
    assert [(r["request_id"], r["entropy_nats"]) for r in listed] == [("r1", "NaN"), ("r2", 0.0)]
    only = json.loads((await control("requests", "--engine", "b", "-o", "json")).stdout)
    assert [r["request_id"] for r in only] == ["r2"]
    first, second = (await control("requests")).stdout.splitlines()[1:]
    assert first.split()[:3] == ["a", "r1", "think"]
    assert second.strip().endswith("force eat applied")


async def test_top_into_a_pipe_until_interrupted(control: Control) -> None:
    control.fleet.engines = [engine("engine-7", 1)]
    command = [*MERIDIANCTL, "top", "--interval-ms", "50"]
    environment = {**os.environ, "MERIDIAN_SERVER": control.address, "FORCE_COLOR": "1", "COLUMNS": "80"}
    process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=PIPE, stderr=PIPE)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(120):
            for _ in range(3):
                await process.stdout.readuntil(b"engine-7")
            process.send_signal(signal.SIGINT)
            _, errors = await process.communicate()
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    assert (process.returncode, errors) == (OK, b"")


async def test_wait_for_engines_that_lag(control: Control, file: Path) -> None:
    await control("policy", "apply", "-f", file)
    control.fleet.engines = [engine("a", 1), engine("b", 0), engine("gone", 0, state=0)]
    waiting = asyncio.create_task(control("wait"))
    done, _ = await asyncio.wait([waiting], timeout=0.5)
    assert not done
    control.fleet.engines[1].acked_revision = 1
    result = await waiting
    assert (result.exit_code, result.stdout) == (OK, "revision 1 is applied on all 2 connected engines\n")


async def test_wait_times_out(control: Control) -> None:
    control.fleet.engines = [engine("a", 2), engine("b", 1)]
    result = await control("wait", "--revision", 2, "--timeout", 0)
    assert (result.exit_code, result.stderr) == (FAILED, "b is at revision 1\n")


async def test_what_replicas_do_not_say_is_missing(control: Control, file: Path) -> None:
    await control("policy", "apply", "-f", file)
    control.fleet.engines = [fleet_pb2.Engine(engine_id="e", state=CONNECTED, acked_revision=1)]
    control.fleet.requests = [fleet_pb2.LiveRequest(engine_id="e", request_id="r")]
    control.fleet.unreachable = ["b-1", "a-2"]
    missing = "replicas that did not answer, so that their data is missing: a-2, b-1\n"
    for command in ("engines", "requests"):
        result = await control(command)
        assert (result.exit_code, result.stderr) == (OK, missing)
    result = await control("wait", "--timeout", 0)
    assert (result.exit_code, result.stderr) == (FAILED, missing), "engines of unreachable replicas may lag behind"


async def test_wait_stops_at_a_refusal(control: Control) -> None:
    control.fleet.engines = [engine("a", 1), engine("b", 0, nack_error="unknown parser")]
    result = await control("wait", "--revision", 1, "--timeout", 60)
    assert (result.exit_code, result.stderr) == (FAILED, "b refused: unknown parser\n")


async def test_wait_names_those_that_lag_beside_those_that_refused(control: Control) -> None:
    control.fleet.engines = [engine("a", 0), engine("b", 0, nack_error="no")]
    result = await control("wait", "--revision", 1)
    assert (result.exit_code, result.stderr) == (FAILED, "b refused: no\na is at revision 0\n")


async def test_wait_ignores_the_refusal_of_an_older_revision(control: Control) -> None:
    control.fleet.engines = [engine("b", 0, nack_error="old")]
    result = await control("wait", "--revision", 2, "--timeout", 0)
    assert result.stderr == "b is at revision 0\n"


# ----------------------------------------------------------------------------------------------------------- savings


def compared(**fields: Any) -> fleet_pb2.Savings:
    """Return counts of two arms of 100 requests, with the estimates that follow."""
    treated = fleet_pb2.ArmCounts(requests=100, think_tokens=6000, think_tokens_squares=400_000.0, answers=80)
    control = fleet_pb2.ArmCounts(requests=100, think_tokens=10_000, think_tokens_squares=1_100_000.0, aborts=3)
    counts = {"since_revision": 4, "in_force": True, "max_loss": 0.01, "shadow_saved_tokens": 3900, **fields}
    made = fleet_pb2.Savings(treated=treated, control=control, **counts)
    made.treated.answer_tokens = 800
    forced, natural = Ends(60, reentries=6, aborts=3), Ends(50, empty_answers=1)
    forced.answer_tokens.add(np.array([70.0] * 42 + [500] * 12))
    natural.answer_tokens.add(np.array([70.0] * 48 + [500] * 2))
    made.forced_ends.CopyFrom(spills.message(forced))
    made.natural_ends.CopyFrom(spills.message(natural))
    estimate(made)
    return made


async def test_savings(control: Control) -> None:
    row = compared(judged=100, judged_stops=60, harmful=2, evidence_ratio=0.25)
    control.fleet.savings = fleet_pb2.GetSavingsResponse(savings=[row], unreachable_replicas=["b"])
    result = await control("savings")
    assert result.exit_code == OK
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[0] == "rules since revision 4, in force"
    assert lines[2:4] == [
        "treated 100 60.0 0.0% 10.0 0.0% 0.0% 0.0%",
        "control 100 100.0 0.0% 0.0% 3.0% 0.0%",
    ]
    assert lines[5:7] == ["forced, treated 60 10.0% 20.0% 0.0% 5.0%", "natural, control 50 0.0% 4.0% 2.0% 0.0%"]
    assert lines[4] == "end requests re-entries answer over 80 answer empty aborted"
    saved, own, spilled, harm, evidence = lines[7:]
    assert spilled.startswith("spilled after forced ends, against natural ends: +26.0 points (")
    assert "; long answers alone: +16.0 points (" in spilled
    assert saved.startswith("saved: 40.0% of the thinking (")
    assert "4,000 tokens in all (" in saved
    assert own == "shadow's own estimate: 39.0% of the thinking"
    assert harm == "harm: 2.00% (2 of 100 requests), at most 6.16%; allowed 1.00%"
    assert evidence.startswith("evidence of more harm: 0.25 ")
    assert result.stderr == "replicas that did not answer, so that their data is missing: b\n"
    as_json = json.loads((await control("savings", "-o", "json")).stdout)
    assert as_json["savings"][0]["harm_ratio"]["value"] == 0.02


async def test_savings_show_both_distributions_of_eat(control: Control) -> None:
    row = compared(judged=100, drift_evidence_ratio=0.5)
    for edge, calibrated, seen in ((0.1234, 20, 90), (1.5, 60, 10)):
        row.eat_samples.add(max_nats=edge, calibrated=calibrated, seen=seen)
    control.fleet.savings = fleet_pb2.GetSavingsResponse(savings=[row])
    result = await control("savings")
    lines = " ".join(result.stdout.split())
    shares = "90% (calibrated 25%) up to 0.123, 10% (calibrated 75%) up to 1.5"
    assert f"first EAT sample of 100 requests, in nats: {shares} evidence of drift: 0.5 of the level" in lines


async def test_savings_say_what_is_not_known(control: Control) -> None:
    result = await control("savings")
    assert result.stdout.startswith("No request counts: the entropy section is in shadow or off")
    few = compared(unjudged=7, judged=3, judged_stops=0)
    for field in ("saved_tokens", "spills"):
        few.ClearField(field)
    control.fleet.savings = fleet_pb2.GetSavingsResponse(
        savings=[few], withdrawn_revision=9, withdrawn_reason="it did harm"
    )
    text = (await control("savings")).stdout
    assert text.startswith("revision 9 put the entropy rules into shadow: it did harm\n")
    assert "saved: not known yet, because an arm has too few requests" in text
    assert "spilled after forced ends: not known yet, because a side has too few ends" in text
    why = "no probe came at the places where rules would have ended thinking, 7 not judged for want of a probe"
    assert f"harm: not measured, {why}" in text


async def test_engines_say_that_rules_were_withdrawn(control: Control) -> None:
    control.fleet.engines = [engine("a", 1, withdrawn="it did harm"), engine("b", 1, withdrawn="it did harm")]
    text = (await control("engines")).stdout
    assert text.splitlines()[-1] == "a, b: the control plane has put the entropy rules into shadow: it did harm"
