"""Commands that explain how a request was treated: explain, decisions, shadow, replay and top against a real server and
its log."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import pty
import termios
import tomllib
from contextlib import suppress
from logging.handlers import QueueListener
from pathlib import Path

import grpc
import pytest
from meridian.v1 import agent_pb2, fleet_pb2

from meridian_agent.core.phases import FLAG_SENTENCE
from meridian_control.capabilities.budgets.stream import EngineBudgets
from meridian_control.common.slices import at_once
from meridian_control.engine.shortening import LOWER_CAP
from meridian_control.journal import jsonl_file as files
from meridian_control.journal.log import DecisionLog
from meridian_control.journal.records import Decision
from meridian_control.policy import formats as forms
from tests.contract.clients import calling
from tests.contract.control.app.test_server import Process
from tests.contract.ctl import FAILED, INVALID, OK, REFUSED, ctl, engine, run
from tests.contract.ctl import Control as FakeControl
from tests.contract.ctl import control as fake_control  # noqa: F401 - a fixture
from tests.contract.streams import Control, refusal
from tests.fakes.engine import TEXT
from tests.fakes.linked import LinkedEngine, until
from tests.fakes.sentences import ends_by_id
from tests.fakes.tables import policy
from tests.processes import MERIDIANCTL, begin
from tests.unit.sessions import EARLY, stream

# A scheduler section with a soft close and a cap, both in shadow.
SOFT = {"min_think_tokens": 0, "soft_think_tokens": 2, "shadow": True, "max_think_tokens": 100}


async def ready(control: Control) -> None:
    """Wait until the engine has the policy in force, so that its first report of a request is answered with a cap."""
    await until(lambda: control.connected() and control.engine().acked_revision == control.fleet.revision)


async def one_life(control: Control, linked: LinkedEngine, name: str = "chatcmpl-mine-9f") -> None:
    """Play a request that its cap ends and that then finishes."""
    await ready(control)
    linked.open(name, tenant="acme")
    linked.step()
    await linked.hears(linked.caps)
    await linked.steps_until(lambda: control.engine().ends)
    linked.engine.finish(name)
    await linked.steps_until(lambda: not control.engine().open_decisions and not control.names())


async def test_a_finished_request_is_explained(control: Control) -> None:
    await control.set_policy(policy(scheduler={"max_think_tokens": 90}))
    with LinkedEngine([control.target]) as linked:
        await one_life(control, linked)
        told = await ctl(control, "explain", "mine")
        as_json = json.loads((await ctl(control, "explain", "mine", "-o", "json")).stdout)
        as_toml = tomllib.loads((await ctl(control, "explain", "mine", "-o", "toml")).stdout)
    assert told.exit_code == OK, told.output
    heading, opened, closed, columns, *rows = told.stdout.splitlines()
    assert heading == "request chatcmpl-mine-9f on engine (1), model model, tenant acme, SLO class slo"
    assert "1 prompt tokens, max_tokens 1000" in opened
    assert "(stop): 90 thinking and " in closed
    assert columns.split() == ["seconds", "thinking", "answer", "event", "why", "outcome"]
    text = "\n".join(rows)
    assert "cap set" in text
    assert "cap 90 (scheduler.max_think_tokens)" in text
    assert "applied at 90" in text
    assert "thinking ended: cap reached" in text
    assert rows[-1].split()[3:] == ["closed:", "stop"]
    life = as_json["life"]
    assert [e["kind"] for e in life["events"] if e["kind"] != "decision"] == ["opened", "think_end", "closed"]
    assert "live" not in as_json
    assert as_toml["life"]["request_id"] == life["request_id"] == "chatcmpl-mine-9f"


async def test_a_live_request_is_explained_with_what_it_is_now(control: Control) -> None:
    with LinkedEngine([control.target]) as linked:
        linked.open("a")
        await linked.steps_until(linked.caps)
        told = await ctl(control, "explain", "a", "--engine", "engine")
        missing = await ctl(control, "explain", "a", "--engine", "other")
    assert "live, thinking: " in told.stdout
    assert (missing.exit_code, missing.stdout) == (FAILED, "")
    assert missing.stderr.startswith('NOT_FOUND: no request "a" of engine "other" in the decision log')


async def test_only_a_request_whose_stream_is_lost_has_an_unknown_end(control: Control) -> None:
    lost = "end unknown, because the stream is lost"
    with LinkedEngine([control.target], "other") as other:
        with LinkedEngine([control.target]) as linked:
            for each in (linked, other):
                each.open("x")
                await each.steps_until(each.caps)
            both = await ctl(control, "explain", "x")
        await until(lambda: not control.connected())
        one = await ctl(control, "explain", "x")
    assert [line.split(": ")[0] for line in both.stdout.splitlines() if line.startswith("live")] == [
        "live, thinking",
        "live",
    ]
    assert (both.stdout.count(lost), one.stdout.count(lost)) == (0, 1)
    assert "agent off or frozen, or stream lost" in one.stdout, "what became of its decisions"


async def test_decisions_are_listed_newest_first(control: Control) -> None:
    with LinkedEngine([control.target]) as linked:
        for name in "ab":
            linked.open(name)
        await linked.steps_until(lambda: len(linked.caps()) == 2)
        caps = json.loads((await ctl(control, "decisions", "--kind", "cap", "-o", "json")).stdout)
        assert [c["request_id"] for c in caps] == ["b", "a"]
        assert {c["reason"] for c in caps} == {"hard_cap"}
        newest = tomllib.loads((await ctl(control, "decisions", "--limit", 1, "-o", "toml")).stdout)
        assert len(newest["logged_decision"]) == 1
        shown = (await ctl(control, "decisions", "--request", "a", "--reason", "hard_cap", "-o", "wide")).stdout
        assert "cap 600 (scheduler.max_think_tokens)" in shown
        assert shown.split()[-2:] == ["cap", "hard_cap"]
        assert (await ctl(control, "decisions", "--reason", "rank")).stdout == "no decision matches\n"
        assert (await ctl(control, "decisions", "--engine", "engine", "--reason", "eat")).exit_code == OK
        nowhere = await ctl(control, "decisions", "--engine", "b")
        assert (nowhere.exit_code, nowhere.stdout) == (FAILED, "")
        assert nowhere.stderr == '--engine: no engine "b" is known; known engines are engine\n'
        unknown = await ctl(control, "decisions", "--reason", "hardcap")
        assert (unknown.exit_code, unknown.stdout) == (INVALID, "")
        assert unknown.stderr.startswith("reason must be one of answer_reserve, budget, eat, ")
        assert unknown.stderr.endswith('; got "hardcap"\n')
        async with calling(control.target) as clients:
            code, _ = await refusal(clients.fleet.ListDecisions(fleet_pb2.ListDecisionsRequest(page_size=-1)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT


async def test_shadow_is_held_against_what_came(control: Control) -> None:
    await control.set_policy(policy(scheduler=SOFT, entropy={"enabled": False}))
    with LinkedEngine([control.target]) as linked:
        linked.engine.tracker.sentences = ends_by_id(bytes(TEXT) + bytes([FLAG_SENTENCE]))
        await ready(control)
        linked.open("a", own_cap=120)
        linked.step()
        await linked.hears(linked.caps)
        await linked.steps_until(lambda: control.engine().ends.get("hard_cap"))
        rows = json.loads((await ctl(control, "shadow", "-o", "json")).stdout)
        text = (await ctl(control, "shadow")).stdout
    assert [(r["section"], r["reason"], r["requests"], r["think_tokens"]) for r in rows] == [
        ("loop", "", 1, 120),
        ("scheduler", "", 1, 120),
        ("scheduler", "hard_cap", 1, 120),
    ]
    assert (rows[2]["would_end_think_tokens"], rows[2]["saved_tokens"]) == (100, 20)
    assert "first rule to fire" in text
    assert "16.7 %" in text
    assert "when it connects to another replica" in text


async def test_policy_explain_shows_what_holds_for_a_live_request(control: Control) -> None:
    """Nothing shortens the control group, and a budget may shorten others below what the policy says."""
    budget = {"name": "acme", "tenant": "acme", "tokens_per_day": 1, "max_think_tokens": 40, "shadow": False}
    entropy = {"holdout_share": 0.5, "shadow": False}
    await control.set_policy(policy(scheduler=EARLY | {"max_think_tokens": 90}, entropy=entropy, budget=[budget]))

    async def explained(name: str, *arguments: object) -> dict[str, tuple[object, str]]:
        listed = json.loads(
            (await ctl(control, "policy", "explain", "--request", name, *arguments, "-o", "json")).stdout
        )
        return {row["path"]: (row["value"], row["origin"]) for row in listed}

    with LinkedEngine([control.target]) as linked:
        await ready(control)
        for name, tenant, own_cap in (("r1", "acme", None), ("r2", "acme", None), ("r4", "", None), ("r3", "", 50)):
            linked.open(name, tenant=tenant, own_cap=own_cap)
        (session,) = control.fleet.counted_sessions()
        await linked.steps_until(lambda: len(linked.caps()) == 4)
        at_once(session.part(EngineBudgets).set_stages({"acme": LOWER_CAP}))
        held, shortened, plain, own = [await explained(name) for name in ("r1", "r2", "r4", "r3")]
        other = await explained("r1", "--tenant", "b")
    cap = "scheduler.max_think_tokens"
    assert [each[cap] for each in (held, shortened, plain, own, other)] == [
        ("32768", "control_group"),
        ("40", "budget acme"),
        ("90", "policy"),
        ("50", "request"),
        ("90", "policy"),
    ]
    assert held["entropy.shadow"] == held["budget[0].shadow"] == ("true", "control_group")
    assert (shortened["entropy.shadow"], shortened["budget[0].shadow"]) == (("false", "policy"), ("false", "policy"))
    assert shortened["scheduler.soft_think_tokens"] == ("40", "budget acme")


# ------------------------------------------------------------------------------------------------------------- replay


async def test_replay_of_what_the_server_recorded(control: Control, tmp_path: Path) -> None:
    """Replay under the recorded policy changes nothing; under another policy it shows what that policy would have
    changed."""
    given = policy(scheduler={"max_think_tokens": 15})
    await control.set_policy(given)
    trace, same, other = tmp_path / "a.trace", tmp_path / "same.toml", tmp_path / "other.toml"
    same.write_text(forms.to_toml(given))
    other.write_text("scheduler.max_think_tokens = 6")
    recording = asyncio.create_task(ctl(control, "record", trace, "--requests", 3))
    await until(lambda: control.fleet.recordings)
    with LinkedEngine([control.target]) as linked:
        # The first request began before the trace, so the request is in the snapshot with its first token.
        for name in ("before", "a", "b", "c"):
            linked.open(name)
            await linked.steps_until(lambda: not linked.engine.thinking(name))  # noqa: B023
            linked.engine.finish(name)
        await linked.steps_until(recording.done)
    assert (await recording).exit_code == OK
    nothing = await run("replay", trace, "--policy", same, server="127.0.0.1:1")
    assert nothing.exit_code == OK, nothing.output
    assert "The new policy changes 0 ends of thinking" in nothing.stdout
    told = json.loads((await run("replay", trace, "--policy", same, "-o", "json", server="")).stdout)
    assert (told["requests"], told["left_out"]) == (3, {"began before the trace": 1})
    assert all(row["recorded"] == row["new"] for row in told["by_request"])
    arguments = ("replay", trace, "--policy", other)
    changed = [await run(*arguments, server="") for _ in range(2)]
    assert changed[0].stdout == changed[1].stdout
    assert "The new policy changes 3 ends of thinking" in changed[0].stdout, changed[0].stderr
    as_toml = tomllib.loads((await run(*arguments, "-o", "toml", server="")).stdout)
    assert [row["new"] for row in as_toml["by_request"]] == [{"reason": "hard_cap", "think_tokens": 6}] * 3
    assert as_toml["ends"] == {"recorded": {"hard_cap": 3}, "new": {"hard_cap": 3}}


async def test_replay_of_files_that_cannot_be_used(tmp_path: Path) -> None:
    bad, good, empty = (tmp_path / f"{name}.toml" for name in ("bad", "good", "empty"))
    bad.write_text("entropy.ema_alpha = 2")
    good.write_text("entropy.ema_alpha = 1")
    empty.write_text("")
    result = await run("replay", tmp_path / "no.trace", "--policy", empty, server="")
    assert (result.exit_code, result.stderr.partition(";")[0]) == (INVALID, f"{empty}: has no fields")
    result = await run("replay", tmp_path / "no.trace", "--policy", bad, server="")
    assert (result.exit_code, result.stderr) == (INVALID, f"{bad}:1: entropy.ema_alpha must be in (0, 1]; got 2\n")
    result = await run("replay", tmp_path / "no.trace", "--policy", good, server="")
    assert result.exit_code == INVALID
    assert result.stderr.endswith("no.trace: cannot be read: No such file or directory\n")


# --------------------------------------------------------------------------------------------------------- the file


async def test_decisions_go_to_a_file(own: Process) -> None:
    path = own.folder / "decisions.jsonl"
    own.options = ("--decision-log", str(path))
    await own.started()
    with LinkedEngine([own.target], "e") as linked:
        linked.open("a")
        await linked.steps_until(linked.caps)
        linked.engine.finish("a")
        await linked.steps_until(lambda: path.read_text().count("\n") >= 2)
    assert await own.terminate() == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    (cap,) = [line for line in lines if line["kind"] == "cap"]
    assert (cap["engine_id"], cap["request_id"], cap["outcome"]) == ("e", "a", "OUTCOME_REQUEST_GONE")
    assert cap["comparisons"][0]["limit_name"] == "scheduler.max_think_tokens"


@pytest.mark.parametrize(("name", "why"), [("no/file", "No such file or directory"), (".", "Is a directory")])
async def test_a_file_that_cannot_be_opened_is_said_at_the_start(own: Process, name: str, why: str) -> None:
    own.options = ("--decision-log", str(path := own.folder / name))
    own.start()
    assert await own.ended() == 2
    assert own.log() == f"meridian-control: --decision-log: {path} cannot be written: {why}\n"


def logged(count: int) -> list[Decision]:
    made = stream(policy(scheduler=EARLY))
    for number in range(count):
        made.open(f"r{number}", think=2, answer=1)
    made.step(6)
    return list(made.log.decisions())


def test_the_file_is_rotated_by_size_and_old_ones_go(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    decisions = logged(100)
    with files.decision_file(path, max_bytes=4000) as write:
        assert write is not None
        for made in decisions:
            write(made)
    found = sorted(tmp_path.iterdir())
    old = [f"d.jsonl.{n}" for n in range(1, files.OLD_FILES + 1)]
    assert [p.name for p in found] == ["d.jsonl", *old, "d.jsonl.lock"]
    assert all(p.stat().st_size <= 4000 for p in found)
    assert json.loads(path.read_text().splitlines()[-1])["decision_id"] == str(decisions[-1].decision_id)


def test_a_line_without_its_end_spoils_no_other(tmp_path: Path) -> None:
    """A control plane that was killed, or whose disk was full, leaves such a line."""
    path, decisions = tmp_path / "d.jsonl", logged(2)
    path.write_text('{"decision_id":"1"}\n{"decision_i')
    for made in decisions:
        with files.decision_file(path) as write:
            assert write is not None
            write(made)
    _, _, *lines = path.read_text().splitlines()
    assert [json.loads(line)["decision_id"] for line in lines] == [str(made.decision_id) for made in decisions]


def test_what_cannot_be_written_is_left_out_and_said_once_a_minute(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full, has room again after half a minute, and is full once more."""
    decisions, line = logged(20), files._Lines.format
    disk: dict[str, float] = {}

    def formatted(self: files._Lines, record: logging.LogRecord) -> str:
        if disk["is_full"]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return line(self, record)

    monkeypatch.setattr(files._Lines, "format", formatted)
    monkeypatch.setattr(files, "monotonic", lambda: disk["now_s"])
    handler = files._File(tmp_path / "d.jsonl")
    handler.setFormatter(files._Lines())
    for is_full, now_s in ((True, 0.0), (False, 30.0), (True, 59.0), (True, 3600.0)):
        disk.update(is_full=is_full, now_s=now_s)
        for made in decisions:
            handler.handle(logging.makeLogRecord({"msg": made}))
    handler.close()
    said = [record.getMessage() for record in caplog.records]
    assert [text.partition("d.jsonl")[2] for text in said] == [
        ": decisions cannot be written to this file; missing so far: 1",
        f": decisions cannot be written to this file; missing so far: {2 * len(decisions) + 1}",
    ]
    assert len((tmp_path / "d.jsonl").read_text().splitlines()) == len(decisions)
    caplog.clear()
    monkeypatch.setattr(files, "WAITING", 1)
    monkeypatch.setattr(QueueListener, "start", lambda _: None)
    monkeypatch.setattr(QueueListener, "stop", lambda _: None)
    with files.decision_file(tmp_path / "d.jsonl") as write:
        assert write is not None
        for made in decisions:
            write(made)
    assert caplog.text.count("written too slowly") == 1


def test_settled_decisions_are_handed_on_once() -> None:
    seen: list[Decision] = []
    made = stream(policy(scheduler=EARLY), log=DecisionLog(seen.append))
    made.open("a", think=4, answer=2)
    made.step(10)
    every = [d.decision_id for d in made.log.decisions()]
    assert sorted(d.decision_id for d in seen) == sorted(every)
    assert all(d.outcome != agent_pb2.OUTCOME_UNSPECIFIED for d in seen)


# ---------------------------------------------------------------------------------------------------------------- top


RICH_VARIABLES = {"COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"}


class Terminal:
    """A `meridianctl` process in a pseudo-terminal of its own."""

    def __init__(self, address: str, *arguments: str) -> None:
        self.master, self.slave = pty.openpty()
        termios.tcsetwinsize(self.slave, (24, 100))
        self.before = termios.tcgetattr(self.slave)
        self.command = [*MERIDIANCTL, *arguments]
        # Rich trusts these variables more than the terminal, so the process must not inherit them.
        inherited = {name: value for name, value in os.environ.items() if name not in RICH_VARIABLES}
        self.environment = {**inherited, "MERIDIAN_SERVER": address, "TERM": "xterm"}
        self.shown = b""

    async def __aenter__(self) -> Terminal:
        self.process = begin(self.command, [self.slave] * 3, self.environment)
        os.set_blocking(self.master, False)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self.slave)

    def reads(self, text: bytes) -> bool:
        with suppress(BlockingIOError):
            self.shown += os.read(self.master, 1 << 16)
        return text in self.shown

    async def ends(self) -> int:
        """Wait for the process to end, assert that the terminal is as it was before, and return the exit status."""

        def ended() -> bool:
            self.reads(b"")
            return self.process.poll() is not None

        await until(ended, 30)
        # Before its end the process may have written more than one read returns.
        with suppress(BlockingIOError):
            while more := os.read(self.master, 1 << 16):
                self.shown += more
        assert termios.tcgetattr(self.slave) == self.before
        assert self.process.returncode is not None
        return self.process.returncode


@pytest.mark.parametrize("how", ["q", "refused"])
async def test_top_until_it_is_left(fake_control: FakeControl, how: str) -> None:  # noqa: F811
    """`top` shows engines and as many of the longest-thinking requests as fit, and leaves the terminal as it was."""
    fake_control.fleet.engines = [engine("engine-7", 1)]
    fake_control.fleet.requests = [
        fleet_pb2.LiveRequest(
            engine_id="engine-7", request_id=f"request-{n}", think_tokens=n, phase=agent_pb2.PHASE_THINK
        )
        for n in range(50)
    ]
    # Updates come much faster than a terminal draws them, so most of them must be left out.
    async with Terminal(fake_control.address, "top", "--interval-ms", "1") as terminal:
        await until(lambda: terminal.reads(b"request-49"), 30)
        await until(lambda: terminal.reads(b"and 33 more"), 30)
        assert b"engine-7" in terminal.shown
        assert b"request-10" not in terminal.shown
        # Servers close streams and restart.
        fake_control.fleet.watch_end = grpc.StatusCode.UNAVAILABLE
        await until(lambda: terminal.reads(b"The connection has ended"), 30)
        fake_control.fleet.engines, fake_control.fleet.watch_end = [engine("engine-8", 1)], None
        await until(lambda: terminal.reads(b"engine-8"), 30)
        if how == "q":
            os.write(terminal.master, b"q")
        else:
            fake_control.fleet.watch_end = grpc.StatusCode.PERMISSION_DENIED
        assert await terminal.ends() == (REFUSED if how == "refused" else OK)
        assert b"\x1b[?1049l" in terminal.shown, "the terminal's normal screen must be restored"
