"""`meridianctl engines`, `requests`, `top` and `wait` against a server whose fleet the test sets."""

import asyncio
import json
import shlex
import tomllib
from itertools import product
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from meridian.v1 import agent_pb2, fleet_pb2, freeze_pb2, policy_pb2, rollout_pb2

from meridian_control.cli import console, top
from meridian_control.common import channels
from meridian_control.common.client_credentials import ClientCredentials
from tests.contract.ctl import (
    CONNECTED,
    FAILED,
    INVALID,
    OK,
    REFUSED,
    UNREACHABLE,
    Control,
    engine,
    run,
    scripted,
)
from tests.contract.proxies import proxy
from tests.processes import BUSY


async def test_engines(control: Control) -> None:
    control.fleet.engines = [engine("a[b]", 1, kv_used=0.25), engine("b", 0, nack_error="no", fault="tripped")]
    listed = json.loads((await control("engines", "-o", "json")).stdout)
    assert [(e["engine_id"], e["acked_revision"], e["kv_used"]) for e in listed] == [("a[b]", 1, 0.25), ("b", 0, 0)]
    assert control.fleet.page_sizes == {1000}
    first, second, reason = (await control("engines")).stdout.splitlines()[1:]
    assert reason == "b (off): the engine runs as stock vLLM until it is started again: tripped"
    assert first.split()[:2] == ["a[b]", "connected"]
    assert "25 %" in first
    assert second.split()[:2] == ["b", "off"]
    assert "0/1 refused" in second
    left = engine("left", 1, state=0)
    refuses = [engine(name, 0, nack_error="no") for name in "abcd"]
    control.fleet.engines = [engine("m", 1, unknown_markers="started without --reasoning-parser"), *refuses, left]
    assert (await control("engines")).stdout.splitlines()[7:] == [
        "m (no markers): no token counts as thinking: started without --reasoning-parser",
        "a, b, c, and 1 more (refuses): revision 1: no",
    ]


async def test_a_long_name_hides_no_other_column(control: Control) -> None:
    control.fleet.engines = [engine("a", 1), engine("b" * 256, 1, fault="tripped")]
    shown = (await control("engines")).stdout
    first = shown.splitlines()[1]
    assert first.split()[:2] == ["a", "connected"]
    assert shown.count("b") >= 256
    assert ": tripped" in " ".join(shown.split())


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
    assert [(r["request_id"], r["entropy_nats"]) for r in listed] == [("r1", None), ("r2", 0.0)]
    only = json.loads((await control("requests", "--engine", "b", "-o", "json")).stdout)
    assert [r["request_id"] for r in only] == ["r2"]
    assert control.fleet.page_sizes == {1000}, "the server looks at the whole fleet for each page"
    first, second = (await control("requests")).stdout.splitlines()[1:]
    assert first.split() == ["a", "r1", "thinking", "0", "0", "0", "0", "0"], "entropy is not known"
    assert second.strip().endswith("end of thinking: EAT is low and has settled (applied)")


async def test_numbers_are_numbers_in_every_form(control: Control) -> None:
    control.fleet.engines = [engine("a", 1, token_events=2**60, kv_used=float("nan"), ends={"eat": 2**40})]
    expected = {"token_events": 2**60, "kv_used": None, "ends": {"eat": 2**40}, "state": "CONNECTION_STATE_CONNECTED"}
    for form, parse in (("json", json.loads), ("yaml", yaml.safe_load)):
        (listed,) = parse((await control("engines", "-o", form)).stdout)
        assert {name: listed[name] for name in expected} == expected
    (listed,) = tomllib.loads((await control("engines", "-o", "toml")).stdout)["engine"]
    assert "kv_used" not in listed
    assert listed["token_events"] == 2**60


async def test_filters_and_a_wide_table(control: Control) -> None:
    control.fleet.engines = [
        engine("a-1", 1, model="qwen", labels={"zone": "x"}, vllm_version="0.26.0"),
        engine("b-1", 1, model="gpt-oss"),
    ]
    control.fleet.requests = [
        fleet_pb2.LiveRequest(engine_id="a-1", request_id="r1", model="qwen", tenant="ann", max_think_tokens=70),
        fleet_pb2.LiveRequest(engine_id="b-1", request_id="r2", model="gpt-oss", tenant="bob"),
    ]
    for option, glob, name in (("--engine", "a-*", "a-1"), ("--model", "gpt*", "b-1")):
        (found,) = json.loads((await control("engines", option, glob, "-o", "json")).stdout)
        assert found["engine_id"] == name
    for option, glob, name in (("--tenant", "b?b", "r2"), ("--model", "qwen", "r1")):
        (found,) = json.loads((await control("requests", option, glob, "-o", "json")).stdout)
        assert found["request_id"] == name
    assert (await control("engines", "--model", "none")).stdout == "no engine matches\n"
    assert (await control("requests", "--model", "none")).stdout == "no live request matches\n"
    wide = (await control("engines", "-o", "wide")).stdout
    assert "zone=x" in wide
    assert "0.26.0" in wide
    assert "zone=x" not in (await control("engines")).stdout
    (row,) = [line for line in (await control("requests", "-o", "wide")).stdout.splitlines() if "r1" in line]
    assert row.split()[-4:] == ["qwen", "ann", "70", "unspecified"]


async def test_what_is_empty_says_so(control: Control) -> None:
    said = {
        "engines": "no engine is connected; an engine connects with MERIDIAN_CONTROL=HOST:PORT in its environment",
        "requests": "no request is live",
        "budgets": "the policy in force has no budget",
        "pressure": "no pressure entry of the policy in force applies to a connected engine",
        "shadow": "nothing is compared yet: no rule is in shadow, or no thinking has ended since the rules changed "
        "or the engines connected to another replica",
    }
    for command, line in said.items():
        assert (await control(command)).stdout == f"{line}\n"


@pytest.mark.parametrize("command", ["requests", "shadow", "pressure"])
async def test_an_engine_that_is_not_known(control: Control, command: str) -> None:
    """Otherwise a wrong name would look like an engine of which there is nothing to say."""
    missing = await control(command, "--engine", "c")
    assert (missing.exit_code, missing.stdout) == (FAILED, "")
    assert missing.stderr == '--engine: no engine "c" is known; none is\n'
    control.fleet.engines = [engine("b", 1), engine("a", 1, state=0)]
    missing = await control(command, "--engine", "c", "-o", "json")
    assert (missing.exit_code, missing.stdout) == (FAILED, "")
    assert missing.stderr == '--engine: no engine "c" is known; known engines are a, b\n'
    for name in "ab":
        assert (await control(command, "--engine", name)).exit_code == OK
    control.fleet.engines = [engine(f"e{number:02}", 1) for number in range(30)]
    assert (await control(command, "--engine", "c")).stderr.endswith(" e18, e19, and 10 more\n")


FOR_EVERYTHING = [
    *(
        (f"{words} ''", "must not be empty; leave the option out instead")
        for words in (
            *(f"--{option}" for option in ("server", "context", "ca", "cert", "key", "token-file")),
            *("freeze --for 1m --reason x --model", "end r --engine", "record never.trace --engine"),
            *("engines --model", "engines --engine", "requests --tenant", "requests --request", "shadow --engine"),
            *("decisions --engine", "decisions --reason", "audit --principal", "policy explain --engine"),
        )
    ),
    *((f"{words} 0", "must be at least 1; got '0'") for words in ("thaw", "rollout abort", "rollout status")),
]


async def test_a_value_that_would_stand_for_everything_is_refused(control: Control) -> None:
    """A variable of a shell that is not set must not freeze or thaw all engines, nor those of another control plane."""
    for words, complaint in FOR_EVERYTHING:
        refused = await control(*shlex.split(words), *(["engines"] if words.startswith("--") else []))
        assert (refused.exit_code, refused.stdout) == (INVALID, "")
        assert complaint in " ".join(refused.stderr.replace("│", " ").split())


TIMES = ["0001-01-01T00:00+14:00", "9999-12-31T23:59-14:00", "yesterday"]


async def test_a_time_that_no_message_can_hold_is_refused(control: Control) -> None:
    for text in TIMES:
        for words in (("audit", "--until"), ("decisions", "--since")):
            refused = await control(*words, text)
            assert (refused.exit_code, refused.stdout) == (INVALID, "")
            assert "must be a time such as" in " ".join(refused.stderr.replace("│", " ").split())


NUMBERS = (
    *("wait --timeout", "freeze --for 1m --reason x --wait", "end r --wait", "record never.trace --duration"),
    *("calibrate never.trace --max-loss", "calibrate never.trace --confidence"),
)


async def test_an_option_refuses_what_is_no_finite_number(control: Control) -> None:
    """Each comparison with NaN is false, so that NaN is in every range, and no time ever comes."""
    for words, number in product(NUMBERS, ("nan", "inf")):
        refused = await control(*words.split(), number)
        assert (refused.exit_code, refused.stdout) == (INVALID, "")
        assert f"Invalid value for '{words.rsplit(maxsplit=1)[-1]}'" in refused.stderr


async def test_top_without_a_terminal(control: Control) -> None:
    control.fleet.engines = [engine("engine-7", 1)]
    piped = await control("top")
    assert (piped.exit_code, piped.stderr) == (INVALID, "top needs a terminal; --once prints the fleet as it is now\n")
    once = await control("top", "--once")
    assert once.exit_code == OK
    assert once.stdout.count("engine-7") == 1


async def test_wait_for_engines_that_lag_or_come_back(control: Control, file: Path) -> None:
    await control("policy", "apply", "-f", file)
    lost = engine("c", 0, state=0, lost=True)
    control.fleet.engines = [engine("a", 1), engine("b", 0), engine("gone", 0, state=0), lost]
    waiting = asyncio.create_task(control("wait"))
    done, _ = await asyncio.wait([waiting], timeout=0.5)
    assert not done
    control.fleet.engines[1].acked_revision = 1
    done, _ = await asyncio.wait([waiting], timeout=0.5)
    assert not done
    control.fleet.engines[3] = engine("c", 1)
    result = await waiting
    assert (result.exit_code, result.stdout) == (OK, "revision 1 is applied on all 3 connected engines\n")


@pytest.mark.parametrize(("command", "most_s"), [("wait --timeout 3", 3), ("wait --timeout 0", 1), ("engines", 15)])
async def test_no_call_takes_longer_than_the_command_may(
    control: Control, file: Path, command: str, most_s: float
) -> None:
    await control("policy", "apply", "-f", file)
    control.fleet.engines = [engine("a", 1)]
    assert (await control(*command.split())).exit_code == OK
    (limit_s,) = control.fleet.time_limits_s
    # Deadlines are rounded.
    assert limit_s < most_s + 0.5


async def test_wait_knows_the_revisions_that_are_stored(control: Control, file: Path) -> None:
    await control("policy", "apply", "-f", file)
    result = await control("wait", "--revision", 2)
    assert (result.exit_code, result.stdout) == (FAILED, "")
    assert result.stderr.startswith("NOT_FOUND: ")
    assert "2" in result.stderr


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


async def test_wait_ignores_the_refusal_of_an_older_revision(control: Control, file: Path) -> None:
    await control("policy", "apply", "-f", file)
    await control("policy", "set", "fallback.lease_ms=600")
    control.fleet.engines = [engine("a", 2), engine("b", 0, nack_error="old")]
    result = await control("wait", "--revision", 2, "--timeout", 0)
    assert (result.exit_code, result.stderr) == (FAILED, "b is at revision 0\n")


NONE = "no engine is connected; --allow-none accepts that\n"
LOST = "b is lost: its stream broke off, and it has not come back\n"


NOT_THERE = [
    ((), (), FAILED, NONE),
    ((), ("--allow-none",), OK, "no engine is connected\n"),
    ((), ("--engines", "1"), FAILED, "no engine is connected, of at least 1\n"),
    (("a",), (), OK, "revision 1 is applied on all 1 connected engines\n"),
    (("a",), ("--engines", "2"), FAILED, "1 engines are connected, of at least 2\n"),
    (("a", "b!"), (), FAILED, LOST),
    (("b!",), (), FAILED, NONE + LOST),
    (("b-",), (), FAILED, NONE + "b has left\n"),
    (("b!",), ("--allow-none",), OK, "no engine is connected\n"),
    (("a", "b!"), ("--engines", "1"), OK, "revision 1 is applied on all 1 connected engines\n"),
    (("a", "b!"), ("--engines", "2"), FAILED, "1 engines are connected, of at least 2\nb has left\n"),
    # An engine that has shut down is not expected back.
    (("a", "b-"), (), OK, "revision 1 is applied on all 1 connected engines\n"),
    (("a<", "b?"), ("--revision", "1"), FAILED, "b refused: no\na is at revision 0\n"),
    (("a", "b#"), (), FAILED, "b is at revision 0; its agent is off, and gets no policy: KeyError\n"),
]


async def test_wait_for_engines_that_are_not_there(control: Control, file: Path) -> None:
    """b! is an engine whose stream broke off, b- one that has shut down, a< one that lags, b? one that refuses, and b#
    one whose agent is off."""
    await control("policy", "apply", "-f", file)
    fields: dict[str, dict[str, Any]] = {"!": {"state": 0, "lost": True}, "-": {"state": 0}, "?": {"nack_error": "no"}}
    fields["#"] = {"fault": "KeyError"}
    for engines, options, code, said in NOT_THERE:
        control.fleet.engines = [engine(e[0], int(e[-1] not in "<?#"), **fields.get(e[1:], {})) for e in engines]
        result = await control("wait", "--timeout", 0, *options)
        assert (result.exit_code, result.stdout + result.stderr) == (code, said)


AWAY, HANGS = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED


def listed(**fields: Any) -> fleet_pb2.ListEnginesResponse:
    return fleet_pb2.ListEnginesResponse(engines=[engine("a", **fields)])


def rollout(state: rollout_pb2.RolloutState.ValueType) -> rollout_pb2.GetRolloutResponse:
    return rollout_pb2.GetRolloutResponse(rollout=rollout_pb2.Rollout(rollout_id=1, state=state))


@pytest.mark.parametrize(
    ("words", "script"),
    [
        (
            "wait",
            {
                "GetPolicy": [policy_pb2.GetPolicyResponse(revision=policy_pb2.PolicyRevision(revision=1))],
                "ListEngines": [listed(acked=0), AWAY, listed(acked=1)],
            },
        ),
        (
            "freeze --for 1m --reason x --wait 30",
            {
                "Freeze": [freeze_pb2.FreezeResponse(freeze=freeze_pb2.StoredFreeze(freeze_id=1))],
                "ListEngines": [
                    listed(acked=1),
                    AWAY,
                    listed(acked=1, freeze=fleet_pb2.EngineFreeze(freeze_ids=[1], confirmed=True)),
                ],
            },
        ),
        (
            "rollout status --wait",
            {
                "GetRollout": [
                    rollout(rollout_pb2.ROLLOUT_STATE_RUNNING),
                    AWAY,
                    rollout(rollout_pb2.ROLLOUT_STATE_COMPLETED),
                ]
            },
        ),
    ],
)
@pytest.mark.parametrize("gone", [AWAY, HANGS])
async def test_a_command_that_waits_goes_on_after_a_restart(
    monkeypatch: pytest.MonkeyPatch, words: str, script: dict[str, Any], gone: grpc.StatusCode
) -> None:
    script = {method: [gone if answer is AWAY else answer for answer in answers] for method, answers in script.items()}
    async with scripted(**script) as target:
        assert (await run(*shlex.split(words), server=target)).exit_code == OK
    monkeypatch.setattr(console, "RECONNECT_S", 0.0)
    async with scripted(**script) as target:
        assert (await run(*shlex.split(words), server=target)).exit_code == UNREACHABLE


async def test_watching_goes_on_after_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "WATCH_S", 0.0)
    denied = grpc.StatusCode.PERMISSION_DENIED
    async with scripted(ListEngines=[listed(acked=1), AWAY, listed(acked=1), denied]) as target:
        watched = await run("engines", "--watch", server=target)
    assert (watched.exit_code, watched.stdout.count("connected")) == (REFUSED, 2)
    assert [line.partition(":")[0] for line in watched.stderr.splitlines()] == ["UNAVAILABLE", "PERMISSION_DENIED"]
    async with scripted() as target:
        assert (await run("engines", "--watch", server=target)).exit_code == UNREACHABLE


async def test_top_ends_if_the_control_plane_stays_away(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "RECONNECT_S", 0.0)
    with grpc.insecure_channel(control.address) as channel:
        watch = top._Watch(console.Client(channel), fleet_pb2.WatchFleetRequest(interval_ms=1))
        updates = iter(watch)
        await asyncio.to_thread(next, updates)
        control.fleet.watch_end = AWAY
        with pytest.raises(grpc.RpcError):
            await asyncio.to_thread(list, updates)


async def test_top_says_that_no_update_comes(control: Control) -> None:
    with grpc.insecure_channel(control.address) as channel:
        watch = top._Watch(console.Client(channel), fleet_pb2.WatchFleetRequest(interval_ms=2**31 - 1))
        updates = top._newest(watch, 0.05)
        control.fleet.engines = [engine("a", 1)]
        came = [(await asyncio.to_thread(next, updates)).engines for _ in range(2)]
        watch.stop()
    assert [len(engines) for engines in came if engines] == [1]


async def test_a_stream_ends_if_the_network_is_lost(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "KEEPALIVE", [(name, 500) for name, _ in channels.KEEPALIVE])
    monkeypatch.setattr(top, "RECONNECT_S", 0.0)
    with proxy() as between:
        monkeypatch.setenv("MERIDIAN_PROXY", between.url)
        with console.Target(control.address, "", ClientCredentials()).channel() as channel:
            watch = top._Watch(console.Client(channel), fleet_pb2.WatchFleetRequest(interval_ms=1000))
            updates = iter(watch)
            await asyncio.to_thread(next, updates)
            between.silent = True
            ended = asyncio.create_task(asyncio.to_thread(list, updates))
            await asyncio.wait([ended], timeout=20 * BUSY)
            watch.stop()
            with pytest.raises(grpc.RpcError):
                await ended


async def test_budgets(control: Control) -> None:
    acme = policy_pb2.BudgetPolicy(name="acme", tenant="a*", effort="high", tokens_per_minute=600, burst_tokens=900)
    every = policy_pb2.BudgetPolicy(name="all", tokens_per_day=10**9, shadow=True)
    floor, whole = fleet_pb2.BUDGET_STAGE_FLOOR, fleet_pb2.BUDGET_STAGE_UNSHORTENED
    control.fleet.budgets = fleet_pb2.ListBudgetsResponse(
        budgets=[
            fleet_pb2.Budget(policy=acme, stage=floor, used_tokens=5000, minute_left_tokens=-90.4, left_ratio=-0.1),
            fleet_pb2.Budget(policy=every, stage=whole, used_tokens=12, day_left_tokens=10**9 - 12, left_ratio=1.0),
        ]
    )
    result = await control("budgets")
    assert result.exit_code == OK
    rows = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert rows[1:] == [
        "acme tenant a*, effort high floor -10 % -90 of 900 5000",
        "all every request unshortened, in shadow 100 % 999,999,988 of 1,000,000,000 12",
        "usage of all replicas as of never",
    ]
    (first, _) = json.loads((await control("budgets", "-o", "json")).stdout)
    assert (first["policy"]["name"], first["stage"]) == ("acme", "BUDGET_STAGE_FLOOR")
