"""`meridianctl policy` against a real server over a real store."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import grpc
import pytest
from meridian.v1 import policy_pb2
from typer.testing import Result

from meridian_control import __version__
from meridian_control.cli.console import NO_ANSWER
from meridian_control.policy.diff import diff
from meridian_control.policy.formats import parse_toml
from meridian_control.policy.model import Policy
from meridian_control.policy.model_families import model_families
from tests.contract.ctl import FAILED, INVALID, OK, UNREACHABLE, Control, run, scripted


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
    got = (await control("policy", "get")).stdout
    file.write_text(got.replace("lease_ms = 500", "lease_ms = 600"))
    assert (await control("policy", "apply", "-f", file)).stdout.startswith("revision 2 ")


async def test_the_policy_in_force_makes_no_revision(control: Control, file: Path) -> None:
    (revision,) = (await control("policy", "apply", "-f", file)).stdout.splitlines()
    for again in (("apply", "-f", file), ("apply", "-f", file, "--etag", ""), ("set", "fallback.lease_ms=500")):
        result = await control("policy", *again)
        assert (result.exit_code, result.stdout) == (OK, f"{revision}, unchanged\n")
    assert len(json.loads((await control("policy", "history", "-o", "json")).stdout)) == 1
    stale = await control("policy", "apply", "-f", file, "--etag", "0-0")
    assert stale.exit_code == FAILED


async def values(control: Control) -> set[tuple[str, str]]:
    """Return the fields that are not at their defaults, with their values."""
    policy = parse_toml((await control("policy", "get")).stdout)
    return {(c.path, c.after) for c in diff(Policy(), policy)}


async def test_set_and_merge_change_some_fields(control: Control, file: Path, tmp_path: Path) -> None:
    """All other fields keep their values, and a value that is no TOML is a string."""
    await control("policy", "apply", "-f", file)
    before = await values(control)
    fields = "scheduler.max_think_tokens=4000", "scheduler.strategy=deadline", 'model."qwen3.5-x".closing_text=So'
    shown = await control("policy", "set", *fields, "--diff", "--reason", "try")
    assert (shown.exit_code, "scheduler.max_think_tokens" in shown.stdout) == (OK, True)
    after = await values(control)
    assert after > before
    assert {path for path, _ in after - before} >= {"scheduler.max_think_tokens", "scheduler.strategy"}
    assert "qwen3.5-x" in (await control("policy", "get")).stdout
    part = tmp_path / "part.toml"
    part.write_text("[scheduler]\nmax_think_tokens = 5000\n")
    assert (await control("policy", "apply", "--merge", "-f", part)).stdout.startswith("revision 3 ")
    merged = await values(control)
    assert {path for path, _ in merged ^ after} == {"scheduler.max_think_tokens"}
    assert (await control("policy", "apply", "-f", part)).stdout.startswith("revision 4 ")
    assert await values(control) == {("scheduler.max_think_tokens", "5000")}


BAD_FIELDS = [
    (("loop.shadow=true", "loop.shadow=false"), "loop.shadow must have one value; got true and false\n"),
    (["scheduler"], "scheduler must be FIELD=VALUE, for example scheduler.max_think_tokens=4000"),
    (["max_think_tokens=3"], "max_think_tokens=3 must be FIELD=VALUE"),
    (["scheduler.max_think_tokens="], "scheduler.max_think_tokens= must be FIELD=VALUE"),
    (["a b.c=1"], "a b.c=1 must be FIELD=VALUE"),
    (["scheduler.max_think_tokens=many"], "scheduler.max_think_tokens "),
    (["scheduler.max_thinks=3"], "scheduler.max_thinks "),
    (["entropy.shadow=false", "entropy.nothing=1"], "entropy.nothing "),
]


async def test_bad_fields_are_named_and_nothing_is_set(control: Control, file: Path) -> None:
    await control("policy", "apply", "-f", file)
    before = await values(control)
    for fields, line in BAD_FIELDS:
        result = await control("policy", "set", *fields)
        assert (result.exit_code, result.stdout) == (INVALID, "")
        assert result.stderr.startswith(line)
        assert await values(control) == before


async def test_an_empty_file_is_an_error(control: Control, file: Path) -> None:
    """A pipe whose first program fails must not bring back the defaults."""
    await control("policy", "apply", "-f", file)
    before = await values(control)
    commands = ("policy apply", "policy apply --merge", "policy validate")
    for empty, command in product(("", "# nothing\n"), commands):
        file.write_text(empty)
        result = await control(*command.split(), "-f", file)
        assert (result.exit_code, result.stdout) == (INVALID, ""), command
        assert result.stderr.startswith(f"{file}: has no field")
    assert await values(control) == before


async def test_a_policy_comes_from_standard_input(control: Control) -> None:
    result = await run("policy", "apply", "-f", "-", server=control.address, typed="fallback.lease_ms = 500")
    assert result.stdout.startswith("revision 1 ")
    assert ("fallback.lease_ms", "500") in await values(control)


REFUSALS = [
    ("policy set scheduler.max_think_tokens=3", FAILED, "there is no policy in force to change"),
    ("policy get", FAILED, "NOT_FOUND: no policy is stored yet\n"),
    ("policy apply -f /no.toml", INVALID, "/no.toml: cannot be read: No such file or directory\n"),
    ("policy apply", INVALID, "Usage: "),
    ("engines -o xml", INVALID, "Usage: "),
]


async def test_refusals_before_anything_is_stored(control: Control) -> None:
    for command, code, said in REFUSALS:
        result = await control(*command.split())
        assert (result.exit_code, result.stdout) == (code, "")
        assert result.stderr.startswith(said)


async def got(policy: policy_pb2.Policy) -> Any:
    """Return the result of `policy get` from a server of another version that has this policy."""

    async def get(request: policy_pb2.GetPolicyRequest, context: Any) -> policy_pb2.GetPolicyResponse:
        return policy_pb2.GetPolicyResponse(revision=policy_pb2.PolicyRevision(revision=3, policy=policy))

    to_bytes, from_bytes = policy_pb2.GetPolicyResponse.SerializeToString, policy_pb2.GetPolicyRequest.FromString
    methods = {"GetPolicy": grpc.unary_unary_rpc_method_handler(get, from_bytes, to_bytes)}
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("meridian.v1.PolicyService", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        return await run("policy", "get", server=f"127.0.0.1:{port}")
    finally:
        await server.stop(None)


async def test_get_from_an_older_control_plane_leaves_out_removed_fields() -> None:
    """A field that had an effect there is named, because applying the printed policy would lose it."""
    policy = policy_pb2.Policy()
    policy.loop.MergeFromString(b"\x30\xd0\x05\x38\x01")  # near_repeated_tokens = 720, near_shadow = true
    result = await got(policy)
    assert (result.exit_code, parse_toml(result.stdout)) == (OK, parse_toml(""))
    assert result.stderr.startswith(
        "warning: not printed: loop.near_repeated_tokens = 720 has no effect: it was removed after version 0.3.0: "
    )
    assert result.stderr.count("\n") == 1


async def test_a_file_with_a_removed_field_is_refused_before_it_is_sent(control: Control, file: Path) -> None:
    file.write_text("loop.near_repeated_tokens = 0\n")
    result = await control("policy", "apply", "-f", file)
    assert (result.exit_code, result.stdout) == (INVALID, "")
    assert result.stderr.startswith(
        f"{file}:1: loop.near_repeated_tokens was removed after version 0.3.0: loop.min_rounds and "
    )


async def test_get_says_that_the_control_plane_is_newer() -> None:
    """The server's policy has the field 1000, which this version does not know."""
    result = await got(policy_pb2.Policy.FromString(b"\xc0\x3e\x01"))
    assert (result.exit_code, result.stdout) == (FAILED, "")
    reason, *fields = result.stderr.splitlines()
    assert reason.startswith(f"the control plane is newer than this meridianctl ({__version__})")
    assert fields == ['"field 1000" is not a known key']


@pytest.mark.parametrize("command", ["validate", "apply"])
async def test_invalid_file_prints_every_line(control: Control, file: Path, command: str) -> None:
    file.write_text("entropy.ema_alpha = 1.5\nentropy.ema_alfa = 1\n")
    result = await control("policy", command, "-f", file)
    assert (result.exit_code, result.stdout) == (INVALID, "")
    assert result.stderr.splitlines() == [
        f"{file}:1: entropy.ema_alpha must be in (0, 1]; got 1.5",
        f"{file}:2: entropy.ema_alfa is not a known key; did you mean ema_alpha?",
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


@pytest.mark.parametrize(
    "command", ["policy get", "engines", "requests", "wait", "explain r", "decisions", "shadow", "top --once"]
)
async def test_unreachable(command: str) -> None:
    result = await run(*command.split(), server="127.0.0.1:1")
    assert (result.exit_code, result.stdout.strip()) == (UNREACHABLE, "")
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("UNAVAILABLE: ")


STORED = policy_pb2.GetPolicyResponse(revision=policy_pb2.PolicyRevision(revision=1, etag="e"))
CHANGES = [
    "policy apply -f {policy}",
    "policy set fallback.lease_ms=700",
    "policy rollback 1",
    "rollout start -f {policy} --steps {steps}",
    "rollout pause",
    "rollout resume",
    "rollout abort",
    "freeze --for 1m --reason r",
    "thaw",
    "end r",
]
METHODS = (
    *("UpdatePolicy", "RollbackPolicy", "StartRollout", "PauseRollout", "ResumeRollout", "AbortRollout"),
    *("Freeze", "Thaw", "EndThinking"),
)


@pytest.mark.parametrize("command", CHANGES)
async def test_a_change_without_an_answer_may_have_been_made(command: str, file: Path, tmp_path: Path) -> None:
    """A call that was not sent has changed nothing."""
    steps = tmp_path / "steps.toml"
    steps.write_text("[[step]]\npercent = 100\nbake_s = 10\n")
    words = command.format(policy=file, steps=steps).split()
    for code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        async with scripted(GetPolicy=[STORED], **{method: [code] for method in METHODS}) as target:
            lost = await run(*words, server=target)
        assert (lost.exit_code, lost.stdout) == (UNREACHABLE, "")
        assert lost.stderr.splitlines()[1:] == [NO_ANSWER]
    assert NO_ANSWER not in (await run(*words, server="127.0.0.1:1")).stderr


WITH_NUMBERS = [
    "policy get --revision {}",
    "policy rollback {}",
    "policy diff {}",
    "wait --revision {}",
    "thaw {}",
    "rollout status {}",
    "rollout abort {}",
    "top --interval-ms {}",
    "freeze --reason why --for {}d",
    "decisions --kind {}",
]


async def test_a_value_that_no_message_can_hold_is_refused(control: Control) -> None:
    for command in WITH_NUMBERS:
        for value in ("9" * 20, "9" * 5000):
            refused = await control(*command.format(value).split())
            assert refused.exit_code == INVALID
            assert "Invalid value for" in refused.stderr or "--kind must be one of" in refused.stderr


DEFAULTS = "[fallback]\n"


async def applied(control: Control, file: Path, text: str, *options: object) -> Result:
    file.write_text(text)
    return await control("policy", "apply", "-f", file, *options)


def rows(result: Result) -> list[list[str]]:
    """Return the cells of a printed table, in which no cell contains a space."""
    assert result.exit_code == OK
    return [line.split() for line in result.stdout.splitlines()]


async def test_get_an_older_revision(control: Control, file: Path) -> None:
    await control("policy", "apply", "-f", file)
    await applied(control, file, DEFAULTS)
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
    other = await applied(control, file, DEFAULTS, "--request-id", "a")
    assert other.exit_code == INVALID
    assert other.stderr.startswith('request_id must be a new one; got "a"')


async def test_history(control: Control, file: Path) -> None:
    for number in range(3):
        await applied(
            control, file, f"fallback.lease_ms = {500 + number}", "--author", f"a{number}", "--reason", "the\nwhy"
        )
    heading, *shown = rows(await control("policy", "history"))
    assert heading == ["revision", "time", "author", "reason", "etag"]
    assert [row[:3] for row in shown] == [[str(n + 1), "2026-05-04T03:02:01.000Z", f"a{n}"] for n in (2, 1, 0)]
    assert all(row[3:5] == ["the", "why"] for row in shown), "a reason of two lines"
    listed = json.loads((await control("policy", "history", "--limit", 2, "-o", "json")).stdout)
    assert [revision["revision"] for revision in listed] == [3, 2]


async def test_diff(control: Control, file: Path) -> None:
    await control("policy", "apply", "-f", file)
    await applied(control, file, DEFAULTS)
    assert rows(await control("policy", "diff", 1, 2))[1:] == [["fallback.lease_ms", "500", "30000"]]
    listed = json.loads((await control("policy", "diff", "-o", "json")).stdout)
    assert listed == [{"path": "fallback.lease_ms", "before": "500", "after": "30000"}]
    assert (await control("policy", "diff", 0, 1)).stdout.split()[:4] == ["field", "defaults", "revision", "1"]


async def test_rollback(control: Control, file: Path) -> None:
    await control("policy", "apply", "-f", file)
    await applied(control, file, DEFAULTS)
    checked = await control("policy", "rollback", 1, "--dry-run", "--diff")
    assert rows(checked)[1] == ["fallback.lease_ms", "30000", "500"]
    assert checked.stdout.endswith("revision 1: valid, nothing changed\n")
    same = await control("policy", "rollback", 2, "--dry-run", "--diff")
    assert same.stdout == "no field differs\nrevision 2: valid, nothing changed\n"
    assert (await control("policy", "get", "-o", "table")).stdout == "every field has its default\n"
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
    assert by_label[:2] == [["revision", "1"], ["field", "value", "from"]]
    assert [cap, "100", "override[0]"] in by_label
    by_engine = await control("policy", "explain", "--engine", "e", "--tenant", "acme", "-o", "toml")
    assert by_engine.stdout.startswith("# revision 1\n")
    assert f"{cap} = 100  # override[0]\n" in by_engine.stdout
    holds = parse_toml(by_engine.stdout)
    assert holds.entropy.rank_conditions[0].max_ranks == (5, 7)
    assert holds.scheduler.max_think_tokens == 100
    plain = json.loads((await control("policy", "explain", "-o", "json")).stdout)
    assert {"revision": 1, "path": cap, "value": "32768", "origin": "default"} in plain
    missing = await control("policy", "explain", "--engine", "x")
    assert (missing.exit_code, missing.stderr) == (FAILED, 'NOT_FOUND: no engine "x" is connected\n')
    commands = (["policy", "explain"], ["freeze", "--for", "1m", "--reason", "x"])
    for command, label in product(commands, ("zone", "=a", "=a=b", "")):
        bad = await control(*command, "--label", label)
        assert (bad.exit_code, bad.stderr) == (INVALID, f"--label must be NAME=VALUE; got {label}\n")
    for command in commands:
        bad = await control(*command, *("--label", "zone=a=b", "--label", "zone=b"))
        said = "--label must give a name one value; got zone=a=b and zone=b\n"
        assert (bad.exit_code, bad.stderr) == (INVALID, said)


LOW_FLOOR = """
[scheduler]
min_think_tokens = 21
calibrated_cap_tokens = 150
[[budget]]
name = "acme"
tokens_per_minute = 3000
min_think_tokens = 1
shadow = false
"""


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
async def test_apply_warns_of_a_floor_below_what_calibration_found(
    control: Control, file: Path, dry: tuple[str, ...]
) -> None:
    file.write_text(LOW_FLOOR)
    done = await control("policy", "apply", "-f", file, *dry)
    assert done.exit_code == OK
    assert done.stderr == (
        "warning: budget acme may cut thinking to 21 tokens, below the 150 that the policy's calibration found to be "
        "enough\n"
    )
    file.write_text(LOW_FLOOR.replace("min_think_tokens = 1\n", ""))
    assert (await control("policy", "apply", "-f", file, *dry)).stderr == ""
    file.write_text(LOW_FLOOR.replace("min_think_tokens = 1\n", "").replace("[[", "[entropy]\nholdout_share = 0.0\n[["))
    unmeasured = await control("policy", "apply", "-f", file, *dry)
    assert unmeasured.stderr.startswith("warning: harm is not measured: entropy.holdout_share is 0")
