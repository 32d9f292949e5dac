"""The status page: the data that it gets over HTTP, and what a browser shows."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal

import aiohttp
import pytest
import pytest_asyncio
from meridian.v1 import agent_pb2, fleet_pb2

from meridian_control.capabilities.budgets.fleet import BudgetSharing
from meridian_control.capabilities.control_group.cohorts import LENGTH
from meridian_control.capabilities.control_group.fleet import Comparisons
from meridian_control.capabilities.self_calibration.fleet import SelfCalibration
from meridian_control.common.errors import StoreUnavailable
from meridian_control.engine.freeze_state import Match
from meridian_control.fleet.membership import Replica
from meridian_control.fleet.whole_fleet import WholeFleet
from meridian_control.page import contents, server, tables
from meridian_control.page.contents import Collector, Contents
from meridian_control.page.history import History
from meridian_control.page.server import FILES, MAX_VIEWERS, StatusPage
from meridian_control.policy.shortening_kinds import CAP, ENTROPY
from meridian_control.policy.store import PolicyStore
from meridian_control.rollout.driver import STORE_S, Rollouts
from meridian_control.rollout.plan import Plan
from meridian_control.rollout.state import By
from meridian_control.rollout.store import RolloutStore
from tests.contract.clients import calling
from tests.contract.control.journal.test_why import one_life
from tests.contract.streams import Control, call_to, controlling
from tests.fakes.agent import hello
from tests.fakes.control import asking, utc_now
from tests.fakes.fleets import requests_of
from tests.fakes.linked import LinkedEngine, until
from tests.fakes.tables import policy
from tests.needed import CHROMIUM
from tests.processes import BUSY
from tests.replicated import until_answer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from playwright.async_api import Browser, Page, Route

# One event loop serves all tests, because one browser does.
pytestmark = pytest.mark.asyncio(loop_scope="module")

# JavaScript that names an element of the page, and JavaScript that names the element with the focus.
NAME = "(e) => `${e.tagName} ${e.id || e.ariaLabel || e.textContent.slice(0, 40)}`"
PLACE = f"({NAME})(document.activeElement)"


@asynccontextmanager
async def served(path: Path, peers: Any = None) -> AsyncIterator[tuple[Control, str]]:
    """Yield a control plane that serves its status page, and the page's address. peers: asks the other replicas."""
    async with controlling(path / "meridian.db") as control:
        await control.set_policy(policy(scheduler={"max_think_tokens": 5}))
        whole = WholeFleet(control.fleet, "replica-1", peers, lambda: True)
        page = StatusPage(whole, control.store, RolloutStore(control.store))
        port = await page.start("127.0.0.1", 0)
        try:
            yield control, f"http://127.0.0.1:{port}"
        finally:
            await page.stop()
            assert page._looking is None or page._looking.done(), "the page still reads the store"


async def first_event(session: aiohttp.ClientSession, address: str, *tables: str, **more: str) -> dict[str, Any]:
    """Return what a viewer first gets who asks for these tables; each table has its rows alone."""
    async with session.get(f"{address}/events", params=dict.fromkeys(tables, "") | more) as stream:
        assert (stream.content_type, stream.headers["X-Accel-Buffering"]) == ("text/event-stream", "no")
        line = await stream.content.readline()
        told: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
        return told | {name: part["rows"] for name, part in told["tables"].items()}


async def test_what_the_page_is_told(tmp_path: Path) -> None:
    async with served(tmp_path) as (control, address), aiohttp.ClientSession() as session:
        names = "engines", "requests", "ends", "rollouts", "revisions"
        empty = await first_event(session, address, *names)
        assert (empty["engines"], empty["requests"], empty["ends"], empty["rollouts"]) == ([], [], [], [])
        assert [r["revision"] for r in empty["revisions"]] == [2, 1]
        with LinkedEngine([control.target]) as linked:
            await one_life(control, linked)
            linked.open("live", tenant="acme")
            await linked.steps_until(lambda: "live" in control.names())
            told = await first_event(session, address, *names)
            for name in names:
                assert name not in await first_event(session, address), "nobody has asked for the table"
        nobody = {"new": 0, "generating": 0, "preempted": 0}
        phases = told["phases"]
        assert (phases["prompt"], phases["output"], sum(phases["think"].values())) == (nobody, nobody, 1)
        assert told["totals"] == {
            "engines": 1,
            "gone": 0,
            "frozen": 0,
            "troubled": 0,
            "thinking": 1,
            "answering": 0,
            "waiting": 0,
            "ended": "hard cap 1",
            "output_critical": 0,
        }
        (engine,) = told["engines"]
        assert (engine["id"], engine["word"], engine["level"], engine["acked_revision"]) == ("engine", "ready", "", 2)
        assert [(r["revision"], r["engines"]) for r in told["revisions"]] == [(2, 1), (1, 0)]
        (live,) = told["requests"]
        assert (live["request"], live["tenant"], live["phase"]) == ("live", "acme", "think")
        assert [(d["reason"], d["outcome"]) for d in told["ends"]] == [("cap reached", "applied")]
        assert told["ends"][0]["why"] == ["cap 5"]
        async with session.get(f"{address}/request", params={"id": "mine"}) as found:
            life = (await found.json())["life"]
        assert (life["request_id"], life["think_tokens"] >= 5) == ("chatcmpl-mine-9f", True)
        assert life["events"][0]["kind"] == "opened"
        async with session.get(f"{address}/request", params={"id": "nobody"}) as missing:
            assert (missing.status, "nobody" in (await missing.json())["error"]) == (404, True)


async def test_engines_are_listed_by_their_numbers(tmp_path: Path) -> None:
    async with served(tmp_path) as (control, address), aiohttp.ClientSession() as session:

        async def listed() -> list[str]:
            return [row["id"] for row in (await first_event(session, address, "engines"))["engines"]]

        with LinkedEngine([control.target], "gpu-10"), LinkedEngine([control.target], "gpu-9"):
            # An engine that has not applied the policy yet is listed first.
            await until_answer(listed, ["gpu-9", "gpu-10"])


async def test_text_of_an_older_agent_is_shown_escaped(tmp_path: Path) -> None:
    """Agents of 0.3.0 report what clients wrote. The page finds the request by what it shows and by what they wrote."""
    hostile = "r\u202egnp.exe\x1b[31m\nCRITICAL"
    opened = agent_pb2.RequestOpened(request_id=hostile, tenant=hostile, model=hostile)
    report = agent_pb2.StepReport(step=1, steps=1, opened=[opened])
    async with served(tmp_path) as (control, address), aiohttp.ClientSession() as session:
        async with call_to(control.target) as call:
            await call.write(agent_pb2.ConnectRequest(hello=hello()))
            await call.write(agent_pb2.ConnectRequest(step=report))
            await until(lambda: control.names() == [hostile])
            told = await first_event(session, address, "requests")
            shown = told["requests"][0]["request"]
            assert shown == r"r\u202egnp.exe\x1b[31m\nCRITICAL"
            assert hostile not in json.dumps(told, ensure_ascii=False)
            for asked in (shown, hostile):
                async with session.get(f"{address}/request", params={"id": asked}) as found:
                    assert (await found.json())["life"]["request_id"] == shown
        async with session.get(f"{address}/request", params={"id": hostile + "?"}) as missing:
            assert r"\u202e" in (await missing.json())["error"]


@pytest.mark.parametrize(("hangs", "trouble"), [(False, "connection refused"), (True, "has not answered yet")])
async def test_engines_are_shown_while_the_database_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: bool, trouble: str
) -> None:
    under_way = 0
    async with served(tmp_path) as (control, address), aiohttp.ClientSession() as session:
        with LinkedEngine([control.target]):
            await until(control.connected)

            async def away(*_: object) -> None:
                nonlocal under_way
                if not hangs:
                    raise StoreUnavailable("policy store: connection refused")
                under_way += 1
                try:
                    await asyncio.Event().wait()
                finally:
                    under_way -= 1

            monkeypatch.setattr(PolicyStore, "history", away)
            monkeypatch.setattr(SelfCalibration, "listed", away)
            async with asyncio.timeout(8):
                told = await first_event(session, address, "engines", "revisions", "budgets", "self_calibrations")
        assert ([engine["id"] for engine in told["engines"]], told["budgets"]) == (["engine"], [])
        assert "revisions" not in told
        assert trouble in told["store_trouble"]
        assert under_way == 2 * hangs
    assert not under_way, "the page still reads the store"


async def test_the_page_compares_treated_requests_with_the_control_group(tmp_path: Path) -> None:
    async with served(tmp_path) as (control, address), aiohttp.ClientSession() as session:
        capped = policy(entropy={"shadow": False}, scheduler={"max_think_tokens": 4000})
        stored, guard = await control.set_policy(capped), control.fleet.part(Comparisons)
        experiment = guard.experiments.experiment_of(stored.revision, stored.policy)
        for arm, tokens in ((experiment.counts.treated, 50), (experiment.counts.control, 100)):
            arm.requests, arm.think_tokens, arm.think_tokens_squares = 40, 40 * tokens, 41.0 * tokens**2
        for judged in (experiment.counts, experiment.kinds[CAP]):
            judged.judged, judged.judged_stops, judged.harmful = 40, 40, 20
        (
            experiment.counts.forced_ends.ends,
            experiment.counts.forced_ends.reentries,
            experiment.counts.natural_ends.ends,
        ) = 30, 12, 30
        await guard.tick()
        told = await first_event(session, address)
        (row,) = told["savings"]
        assert (row["in_force"], row["since_revision"]) == (True, stored.revision)
        assert row["saved_ratio"]["value"] == 0.5
        assert row["harm_ratio"]["low"] < 0.5 < row["harm_ratio"]["high"]
        assert (row["forced_ends"]["reentries"], row["natural_ends"]["ends"]) == (12, 30)
        assert told["withdrawn"] == ""
        cap, rules = row["kinds"]
        assert (cap["text"], cap["level"]) == ("the policy's cap", "bad")
        assert (rules["text"], rules["level"]) == ("the entropy rules", "")
        assert cap["harm"].startswith("50.00 %, at most 6")
        assert told["totals"]["troubled"] == len(told["harm"]) == 1
        assert told["harm"][0].startswith("the policy's cap would have changed 20 of 40 answers")
        judged = experiment.kinds[ENTROPY]
        judged.judged, judged.judged_stops, judged.harmful = 40, 40, 21
        await guard.tick()
        # A viewer of a capability's own table gets what is so now.
        now = await first_event(session, address, "budgets")
        assert now["withdrawn"].startswith(f"Revision {stored.revision + 1} withdrew what did harm: ")
        assert "the entropy rules would have changed 21 of 40" in now["withdrawn"]
        assert now["totals"]["troubled"] == 0


async def test_a_number_that_a_page_cannot_read_is_named_as_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unreadable(*_: object) -> Contents:
        return Contents({"rate": float("nan")}, {})

    monkeypatch.setattr(Collector, "collect", unreadable)
    async with (
        served(tmp_path) as (_, address),
        aiohttp.ClientSession() as session,
        session.get(f"{address}/events") as stream,
    ):
        assert await stream.content.readline() == b"event: trouble\n"


async def test_it_is_read_only_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, address), aiohttp.ClientSession() as session:
        for path in FILES:
            async with session.get(address + path) as answer:
                text = await answer.text()
                assert answer.status == 200
                assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
                assert "://" not in text
            for method in ("POST", "PUT", "DELETE"):
                async with session.request(method, address + path) as refused:
                    assert refused.status == 405
        # A response to HEAD has no body, and the stream is nothing else.
        async with session.head(f"{address}/events") as refused:
            assert refused.status == 405


async def test_viewers_share_one_look_and_are_bounded(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, address), aiohttp.ClientSession() as session:
        streams = [await session.get(f"{address}/events") for _ in range(MAX_VIEWERS)]
        first = await asyncio.gather(*(s.content.readline() for s in streams))
        assert len(set(first)) == 1
        async with session.get(f"{address}/events") as refused:
            assert refused.status == 503
        streams[0].close()
        async with asyncio.timeout(120):
            while (await _status(session, f"{address}/events")) != 200:
                await asyncio.sleep(0.1)
        for stream in streams:
            stream.close()


async def _status(session: aiohttp.ClientSession, address: str) -> int:
    async with session.get(address) as answer:
        return answer.status


# -------------------------------------------------------------------------------------------------------- in a browser


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    """Yield a headless Chromium for all tests of this module."""
    chromium = CHROMIUM.require()
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        started = await playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield started
        await started.close()


@pytest.fixture(autouse=True)
def _soon(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a browser's pages hear of changes sooner than once a second."""
    if "browser" in request.fixturenames:
        monkeypatch.setattr(server, "INTERVAL_S", 0.2)


@asynccontextmanager
async def browsing(browser: Browser) -> AsyncIterator[tuple[Page, list[str]]]:
    """Yield a page in a profile of its own, and the list of the page's errors and warnings."""
    page = await browser.new_page()
    # Playwright's own limit of 30 s is for a machine that is not busy.
    page.set_default_timeout(30_000 * BUSY)
    complaints: list[str] = []
    page.on("console", lambda m: complaints.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda e: complaints.append(str(e)))
    try:
        yield page, complaints
    finally:
        await page.close()


async def test_a_viewer_that_reads_nothing_loses_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A suspended computer keeps its connection open."""
    monkeypatch.setattr(server, "MAX_VIEWERS", 1)
    monkeypatch.setattr(server, "UNREAD_S", 0.05)
    monkeypatch.setattr(server, "INTERVAL_S", 0.0)

    async def large(*_: Any) -> Contents:
        return Contents({"text": "x" * (1 << 20)}, {})

    async with served(tmp_path) as (_, address), aiohttp.ClientSession() as session:
        monkeypatch.setattr(Collector, "collect", large)
        silent = await session.get(f"{address}/events")
        while (answer := await session.get(f"{address}/events")).status == 503:
            answer.close()
            await asyncio.sleep(0.01)
        assert answer.status == 200
        answer.close()
        silent.close()


async def test_small_events_that_nobody_reads_take_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's buffers have room for minutes of such events."""
    monkeypatch.setattr(server, "MAX_VIEWERS", 1)
    monkeypatch.setattr(server, "UNREAD_S", 0.05)
    monkeypatch.setattr(server, "INTERVAL_S", 0.0)
    sizes = itertools.chain([1 << 15], itertools.repeat(1))

    async def small(*_: Any) -> Contents:
        return Contents({"text": "x" * next(sizes)}, {})

    async with served(tmp_path) as (_, address), aiohttp.ClientSession() as session:
        monkeypatch.setattr(Collector, "collect", small)
        with socket.socket() as silent:
            # The first event is larger than what the silent viewer's system takes.
            silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            silent.setblocking(False)
            loop, where = asyncio.get_running_loop(), address.removeprefix("http://")
            await loop.sock_connect(silent, ("127.0.0.1", int(where.rpartition(":")[2])))
            await loop.sock_sendall(silent, f"GET /events HTTP/1.1\r\nHost: {where}\r\n\r\n".encode())
            assert await loop.sock_recv(silent, 12) == b"HTTP/1.1 200"
            async with asyncio.timeout(20 * BUSY):
                while await _status(session, f"{address}/events") == 503:
                    await asyncio.sleep(0.01)


async def rows_of(page: Page, table: str) -> list[list[str]]:
    return [row.split("\t") for row in await page.locator(f"#{table}-table tbody tr").all_inner_texts()]


async def test_a_browser_shows_it_live(browser: Browser, tmp_path: Path) -> None:
    async with browsing(browser) as (page, complaints), served(tmp_path) as (control, address):
        await page.goto(f"{address}/#engines")
        await page.get_by_text("No engine has connected.").wait_for()
        assert await page.get_by_text("No freeze is in force.").is_visible()
        assert not await page.locator("#engines-table").is_visible()
        with LinkedEngine([control.target]) as linked:
            await one_life(control, linked)
            await page.locator("#summary", has_text="1 engine connected, none in trouble, policy revision 2").wait_for()
            await page.locator("#engines-table td", has_text="hard cap 1").wait_for()
            await page.locator("#connection-text", has_text="live").wait_for()
            linked.open("live")
            linked.step()
            # With more steps the request would come to its cap.
            await linked.hears(lambda: "live" in control.names())
            await page.locator("#engines-table td.think", has_text="1").wait_for()
        await page.locator("#engines-table .state", has_text="gone").wait_for()
        await page.locator("#engines-table .cause", has_text="it has shut down").wait_for()
        await page.locator("#summary", has_text="0 engines connected, policy revision").wait_for()
        with LinkedEngine([control.target]):
            await page.locator("#engines-table .state", has_text="ready").wait_for()
            await page.locator("#summary", has_text="1 engine connected, none in trouble").wait_for()
            assert len(await rows_of(page, "engines")) == 1
        assert not complaints


async def test_rows_with_one_key_leave_none_behind(browser: Browser, tmp_path: Path) -> None:
    """An engine that moves is listed by two replicas for a moment."""
    async with browsing(browser) as (page, complaints), served(tmp_path) as (_, address):
        await page.goto(address)
        shown = await page.evaluate(
            """async () => {
              const { fillRows } = await import("./rows.js"), table = document.createElement("table");
              return ["ab", "aab", "aab", "baa", "ba", "aa", "c"].map((names) => {
                fillRows(table, [...names].map((name, i) => name + i), (row) => row[0], (row) => [row]);
                return [...table.rows].map((row) => row.textContent).join(" ");
              });
            }"""
        )
        assert shown == ["a0 b1", "a0 a1 b2", "a0 a1 b2", "b0 a1 a2", "b0 a1", "a0 a1", "c0"]
        assert not complaints


async def test_what_an_engine_does_before_its_stream_ends_is_charted(tmp_path: Path) -> None:
    """The engine has another stream by the next point, at this or another replica."""
    history, begin = History(), utc_now()

    async def note(whole: WholeFleet, seconds: int) -> None:
        engines, sums = await whole.engines_and_sums()
        history.note(engines, sums, 1, begin + timedelta(seconds=seconds), {})

    async with served(tmp_path) as (control, _), asking([Replica("alone", control.target)]) as whole:
        await note(whole, 0)
        with LinkedEngine([control.target]) as linked:
            linked.open("a")
            await linked.steps_until(lambda: control.connected() and control.engine().thinking_tokens)
        await until(lambda: control.fleet.departed)
        with LinkedEngine([control.target]):
            await until(control.connected)
            await note(whole, 10)
        counted = (await control.fleet.totals()).thinking_tokens
    assert counted > 0
    assert [point["think_tokens_per_s"] for point in history.points] == [None, counted / 10]


async def test_a_point_has_the_time_of_its_counts(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates are counts by time, and a capability may wait for a replica that does not answer."""
    begin = now = utc_now()

    async def late(_: Comparisons) -> dict[str, float]:
        nonlocal now
        now += timedelta(seconds=2)
        return {}

    monkeypatch.setattr(Comparisons, "point", late)
    monkeypatch.setattr(control.fleet, "clock", lambda: now)
    page = StatusPage(control.parts.whole, control.store, RolloutStore(control.store))
    await page.start("127.0.0.1", 0)
    await until(lambda: page._history.points)
    await page.stop()
    assert page._history.points[0]["time"] == begin.timestamp()
    assert now > begin


async def test_closed_requests_that_do_not_count_yet_are_shown(browser: Browser, tmp_path: Path) -> None:
    async with served(tmp_path) as (control, address), browsing(browser) as (page, complaints):
        stored = await control.set_policy(policy(entropy={"shadow": False}))
        experiment = control.fleet.part(Comparisons).experiments.experiment_of(stored.revision, stored.policy)
        running, ended = (experiment.cohorts.join(utc_now() + after) for after in (timedelta(), LENGTH))
        ended.counts.control.requests = 1
        ended.leave()
        await page.goto(address)
        await page.locator("#tiles", has_text="1 closed request not counted yet").wait_for()
        await page.goto(f"{address}/#policy")
        waits = page.locator("#savings dd", has_text="1 request, because others that began earlier still run")
        await waits.wait_for()
        running.leave()
        await waits.wait_for(state="detached")
        assert not complaints


async def test_the_last_hour_is_drawn(browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chart has its lines, a revision and a freeze are marks, also of a time before the page was opened, and the
    keyboard chooses a time."""
    monkeypatch.setattr(server, "PERIOD_S", 0.05)
    async with served(tmp_path) as (control, address), browsing(browser) as (page, complaints):
        stored = await control.set_policy(policy(entropy={"shadow": False}, scheduler={"max_think_tokens": 5}))
        experiment = control.fleet.part(Comparisons).experiments.experiment_of(stored.revision, stored.policy)
        for arm, tokens in ((experiment.counts.treated, 50), (experiment.counts.control, 100)):
            arm.requests, arm.think_tokens, arm.think_tokens_squares = 40, 40 * tokens, 41.0 * tokens**2
        experiment.counts.judged, experiment.counts.judged_stops = 400, 40
        with LinkedEngine([control.target]) as linked:
            await one_life(control, linked)
            async with aiohttp.ClientSession() as session:

                async def points() -> list[dict[str, Any]]:
                    async with session.get(f"{address}/history") as answer:
                        return list(await answer.json())

                while (await points())[-1]["revision"] != control.fleet.revision:
                    await asyncio.sleep(0.02)
                assert (await points())[-1]["saved_ratio"] == 0.5
                experiment.counts.treated.requests += 40
                while not any(p.get("saved_tokens_per_s") for p in await points()):
                    await asyncio.sleep(0.02)
                await control.set_policy(policy(scheduler={"max_think_tokens": 7}))
                end = utc_now() + timedelta(minutes=5)
                await control.parts.freezes.add_freeze(Match(("eng*",)), end, "joao", "an incident")
                linked.open("live")
                await linked.steps_until(lambda: control.engine().freeze.confirmed)
                while not (await points())[-1]["frozen"] or (await points())[-1]["revision"] != control.fleet.revision:
                    await asyncio.sleep(0.02)
                assert any(p["think_tokens_per_s"] for p in await points())
                assert any(p["forced_per_min"] for p in await points())
            await page.goto(address)
            charts = page.locator("#history svg")
            await charts.nth(7).wait_for()
            told = [await charts.nth(number).get_attribute("aria-label") or "" for number in range(8)]
            assert [text.partition(":")[0] for text in told] == [
                *("Live requests", "Tokens", "Thinking tokens saved", "Thinking saved", "Harm"),
                *("Latency, P99", "Ends of thinking", "Agent, share of a core"),
            ]
            assert "allowed" in told[4]
            assert "no value" not in told[2] + told[3] + told[4]
            assert await page.locator("#history svg line.revision title", has_text="policy revision").count() >= 8
            assert await page.locator("#history svg rect.frozen title", has_text="1 engine frozen").count() >= 8
            marks = await page.locator("#history-marks").inner_text()
            assert f"policy revision {control.fleet.revision}" in marks
            assert "1 engine frozen from" in marks
            assert await page.locator("#history polyline.think").count() >= 1
            assert await page.locator("#history-ends", has_text="hard cap 1").is_visible()
            await page.locator("#history-clock", has_text="the newest").wait_for()
            await page.get_by_label("Values at").press("Home")
            first = await page.locator("#history-clock").inner_text()
            assert "newest" not in first
            assert await page.locator("#history svg .cursor").count() == 8
            await page.get_by_label("Values at").press("End")
            await page.locator("#history-clock", has_text="the newest").wait_for()
        assert not complaints


async def test_the_last_hour_is_read_when_its_view_is_opened(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "PERIOD_S", 0.05)
    async with served(tmp_path) as (_, address), browsing(browser) as (page, complaints):
        await page.clock.install()
        await page.goto(f"{address}/#engines")
        await page.locator("#engines:not(.stale)").wait_for()
        while len(await (await page.request.get(f"{address}/history")).json()) < 2:
            await asyncio.sleep(0.02)
        await page.clock.pause_at(utc_now() + timedelta(seconds=5))
        async with page.expect_response("**/history"):
            await page.get_by_role("link", name="Overview").click()
        await page.locator("#history svg").first.wait_for()
        # A page that is paused stands still.
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url.rpartition("/")[2]))
        await page.get_by_role("button", name="Pause updates").click()
        await page.clock.run_for(16_000)
        assert asked == []
        await page.get_by_role("button", name="Pause updates").click()
        async with page.expect_response("**/history"):
            await page.clock.run_for(16_000)
        assert not complaints


async def test_no_number_is_shown_while_the_control_plane_is_gone(browser: Browser, tmp_path: Path) -> None:
    async with browsing(browser) as (page, _), controlling(tmp_path / "meridian.db") as control:
        await control.set_policy(policy())
        whole = WholeFleet(control.fleet, "replica-1", None, lambda: True)
        shown = StatusPage(whole, control.store, RolloutStore(control.store))
        port = await shown.start("127.0.0.1", 0)
        await page.goto(f"http://127.0.0.1:{port}/#engines")
        await page.locator("#connection-text", has_text="live").wait_for()
        await page.get_by_text("No engine has connected.").wait_for()
        await shown.stop()
        await page.locator("#gone", has_text="The control plane does not answer, so nothing is shown.").wait_for()
        assert await page.locator("#gone", has_text="heard from it last at").is_visible()
        assert not await page.locator("main").is_visible()
        # Another view shows nothing either.
        await page.get_by_role("link", name="Budgets and tenants").click()
        await page.locator("#connection-text", has_text="trying again").wait_for()
        assert not await page.locator("main").is_visible()
        again = StatusPage(whole, control.store, RolloutStore(control.store))
        await again.start("127.0.0.1", port)
        await page.locator("#connection-text", has_text="live").wait_for()
        await page.get_by_text("The policy has no budget.").wait_for()
        assert not await page.locator("#gone").is_visible()
        await again.stop()


async def test_a_page_of_an_older_version_is_loaded_again(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with browsing(browser) as (page, complaints), served(tmp_path) as (_, address):
        await page.goto(f"{address}/#engines?filter=gpu")
        await page.locator("#engines:not(.stale)").wait_for()
        async with page.expect_event("load"):
            monkeypatch.setattr(contents, "__version__", "9.9.9")
        await page.locator("footer", has_text="meridian-control 9.9.9").wait_for()
        assert page.url.endswith("#engines?filter=gpu")
        assert not complaints


async def test_no_number_is_shown_while_nothing_comes(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control plane that hangs keeps its connections open, as does a network that is lost."""
    collect, goes_on = Collector.collect, asyncio.Event()
    goes_on.set()

    async def hanging(collector: Collector, *arguments: Any) -> Contents:
        await goes_on.wait()
        return await collect(collector, *arguments)

    monkeypatch.setattr(Collector, "collect", hanging)
    async with browsing(browser) as (page, _), served(tmp_path) as (_, address):
        await page.clock.install()
        await page.goto(f"{address}/#engines")
        await page.get_by_text("No engine has connected.").wait_for()
        goes_on.clear()
        await page.clock.fast_forward(60_000)
        await page.locator("#gone", has_text="heard from it last at").wait_for()
        assert not await page.locator("main").is_visible()
        goes_on.set()
        await page.locator("#connection-text", has_text="live").wait_for()
        assert await page.get_by_text("No engine has connected.").is_visible()


async def test_a_page_waits_for_a_long_look(browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at a large fleet, and the pause after it, may last longer than a page waits for any word."""
    collect, goes_on = Collector.collect, asyncio.Event()
    goes_on.set()

    async def late(collector: Collector, *arguments: Any) -> Contents:
        await goes_on.wait()
        return await collect(collector, *arguments)

    monkeypatch.setattr(Collector, "collect", late)
    monkeypatch.setattr(server, "ALIVE_S", 0.05)
    async with browsing(browser) as (page, complaints), served(tmp_path) as (_, address):
        await page.clock.install()
        await page.goto(f"{address}/#engines")
        await page.get_by_text("No engine has connected.").wait_for()
        goes_on.clear()
        for _ in range(4):
            await another_update(page, "looking")
            await page.clock.fast_forward(15_000)
            assert await page.locator("#connection-text").inner_text() == "live"
        # Nobody says that a look that hangs goes on.
        monkeypatch.setattr(server, "LONGEST_S", 0.0)
        await page.clock.fast_forward(60_000)
        await page.locator("#gone", has_text="heard from it last at").wait_for()
        goes_on.set()
        await page.locator("#connection-text", has_text="live").wait_for()
        assert not complaints


async def test_no_number_is_shown_while_the_contents_cannot_be_collected(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: Any) -> Contents:
        raise StoreUnavailable("no contents")

    async with browsing(browser) as (page, complaints), served(tmp_path) as (_, address):
        await page.goto(f"{address}/#engines")
        await page.get_by_text("No engine has connected.").wait_for()
        with monkeypatch.context() as patched:
            patched.setattr(Collector, "collect", away)
            await page.locator("#notice", has_text="no contents").wait_for()
            assert await page.get_by_text("No engine has connected.").is_hidden()
        await page.get_by_text("No engine has connected.").wait_for()
        assert await page.locator("#notice").is_hidden()
        assert not complaints


async def test_a_page_too_many_says_so_and_tries_again(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_VIEWERS", 1)
    async with browsing(browser) as (page, _), served(tmp_path) as (_, address), aiohttp.ClientSession() as session:
        other = await session.get(f"{address}/events")
        await page.goto(address)
        await page.locator("#gone", has_text="because too many are open").wait_for()
        other.close()
        await page.locator("#connection-text", has_text="live").wait_for()


async def test_a_request_is_found_by_keyboard_and_its_life_shown(browser: Browser, tmp_path: Path) -> None:
    async with browsing(browser) as (page, complaints), served(tmp_path) as (control, address):
        with LinkedEngine([control.target]) as linked:
            await one_life(control, linked)
            await page.goto(f"{address}/#requests")
            link = page.locator("#ends-table a", has_text="chatcmpl-mine-9f").first
            await link.wait_for()
            await link.focus()
            await page.keyboard.press("Enter")
            await page.locator("#life h4", has_text="chatcmpl-mine-9f on engine").wait_for()
            focused = await page.evaluate("document.activeElement.id")
            assert focused == "request-heading"
            bar = page.locator("#life .bar")
            assert "think" in (await bar.get_attribute("aria-label") or "")
            events = await page.locator("#life-table tbody tr").all_inner_texts()
            assert any("cap set" in e and "cap 5 (scheduler.max_think_tokens)" in e for e in events)
            assert any("thinking ended: cap reached" in e for e in events)
            spans = await page.locator("#life-spans li").all_inner_texts()
            assert [s.partition(" ")[0] for s in spans[:2]] == ["thinking", "answering"]
            # An update of the rows does not move the focus.
            await page.locator("#request-id").focus()
            await page.keyboard.type("x")
            await another_update(page)
            assert await page.evaluate("document.activeElement.id") == "request-id"
            await page.locator("#request-id").fill("nobody")
            await page.keyboard.press("Enter")
            await page.locator("#life-error", has_text="nobody").wait_for()
            assert await page.locator("#life").is_hidden()
            # A request that nobody knows takes the focus once.
            await page.get_by_label("Filter").press_sequentially("9f")
            await page.wait_for_url("**filter=9f*")
            assert await page.evaluate("document.activeElement.id") == "filter"
            async with page.expect_response("**/request?*"):
                await page.get_by_role("button", name="Show").click()
            await page.go_back()
            await page.locator("#life h4", has_text="chatcmpl-mine-9f on engine").wait_for()
        assert [c for c in complaints if "404" not in c] == []


async def test_an_id_with_signs_of_an_address_opens_its_request(browser: Browser, tmp_path: Path) -> None:
    odd = ["a?b", "50%25&engine=d+e#f g"]
    async with browsing(browser) as (page, complaints), served(tmp_path) as (control, address):
        with LinkedEngine([control.target]) as linked:
            await until(lambda: control.connected() and control.engine().acked_revision == control.fleet.revision)
            for name in odd:
                linked.open(name)
            await linked.steps_until(lambda: sorted(control.names()) == sorted(odd))
            for name in odd:
                heading = page.locator("#life h4", has_text=f"{name} on engine")
                await page.goto(f"{address}/#requests")
                await page.get_by_role("link", name=name, exact=True).first.click()
                await heading.wait_for()
                shown = page.url
                await page.goto("about:blank")
                await page.goto(shown)
                await heading.wait_for()
                await page.goto(f"{address}/#requests")
                await heading.wait_for(state="hidden")
                await page.locator("#request-id").fill(name)
                await page.keyboard.press("Enter")
                await heading.wait_for()
            # Somebody has written the address by hand.
            await page.goto("about:blank")
            await page.goto(f"{address}/#requests?id=a?b")
            await page.locator("#life h4", has_text="a?b on engine").wait_for()
        assert not complaints


async def test_a_life_is_shown_although_one_question_found_no_answer(browser: Browser, tmp_path: Path) -> None:
    async with browsing(browser) as (page, _), served(tmp_path) as (control, address):
        with LinkedEngine([control.target]) as linked:
            await one_life(control, linked)
            await page.route("**/request?*", lambda route: route.abort())
            await page.goto(f"{address}/#requests?id=mine")
            await page.locator("#life-error", has_text="The control plane did not answer").wait_for()
            await page.unroute("**/request?*")
            await page.locator("#life h4", has_text="chatcmpl-mine-9f on engine").wait_for()
            assert await page.locator("#life-error").inner_text() == ""


@pytest.mark.parametrize("hours", [-2, 2])
async def test_a_live_request_is_as_old_as_the_control_plane_says(browser: Browser, tmp_path: Path, hours: int) -> None:
    async with browsing(browser) as (page, complaints), served(tmp_path) as (control, address):
        await page.clock.install(time=utc_now() + timedelta(hours=hours))
        with LinkedEngine([control.target]) as linked:
            linked.open("live")
            await linked.steps_until(control.names)
            await page.goto(f"{address}/#requests?id=live")
            lasted = page.locator("#life-spans li.think")
            await lasted.wait_for()
            assert float((await lasted.inner_text()).split()[1]) < 3600
        assert not complaints


class Silent:
    """Asks another replica, which never answers."""

    async def ask(self, call: object, part: str = "") -> tuple[dict[str, Any], list[str]]:
        return {}, ["replica-2"]

    async def ask_who_knows(self, call: object) -> tuple[list[Any], list[str]]:
        return [], ["replica-2"]


async def test_a_life_is_shown_although_the_replica_that_knew_it_first_was_late(
    browser: Browser, tmp_path: Path
) -> None:
    async with browsing(browser) as (page, _), served(tmp_path, Silent()) as (control, address):
        await page.goto(f"{address}/#requests?id=mine")
        await page.locator("#life-error", has_text="replicas that did not answer: replica-2").wait_for()
        with LinkedEngine([control.target]) as linked:
            await one_life(control, linked)
        await page.locator("#life h4", has_text="chatcmpl-mine-9f on engine").wait_for()


async def test_one_question_at_a_time_asks_for_a_life(browser: Browser, tmp_path: Path) -> None:
    asked: dict[str, list[Route]] = {"one": [], "two": []}
    came = {name: asyncio.Event() for name in asked}

    async def hold(route: Route) -> None:
        (name,) = (name for name in asked if f"id={name}" in route.request.url)
        asked[name].append(route)
        came[name].set()

    async with browsing(browser) as (page, _), served(tmp_path) as (_, address):
        await page.route("**/request?*", hold)
        for name in asked:
            await page.goto(f"{address}/#requests?id={name}")
            async with asyncio.timeout(60.0):
                await came[name].wait()
        async with page.expect_event("requestfailed"):
            await asked["one"][0].abort()
        await another_update(page)
        assert len(asked["two"]) == 1
        await page.unroute_all(behavior="ignoreErrors")


async def test_a_question_to_which_no_answer_comes_is_asked_again(browser: Browser, tmp_path: Path) -> None:
    """A network that is lost breaks no connection."""
    asked: list[Route] = []

    async def lose_the_first(route: Route) -> None:
        asked.append(route)
        if len(asked) > 1:
            await route.continue_()

    async with browsing(browser) as (page, _), served(tmp_path) as (_, address):
        await page.add_init_script("const after = AbortSignal.timeout; AbortSignal.timeout = () => after(50)")
        await page.route("**/request?*", lose_the_first)
        await page.goto(f"{address}/#requests?id=x")
        await page.locator("#life-error", has_text="No request").wait_for()
        assert len(asked) > 1
        await page.unroute_all(behavior="ignoreErrors")


async def another_update(page: Page, kind: str = "message") -> None:
    """Wait until another viewer has received two more updates, so the page has received them too."""
    async with asyncio.timeout(30 * BUSY):
        await page.evaluate(
            """(kind) => new Promise((two) => {
              const events = new EventSource("events");
              let n = 0;
              events.addEventListener(kind, () => ++n > 1 && (events.close(), two()));
            })""",
            kind,
        )


async def test_times_are_those_of_the_browser(browser: Browser, tmp_path: Path) -> None:
    """Logs and meridianctl have UTC, so the page names the zone."""
    noon = datetime(2026, 7, 1, 12, tzinfo=UTC)
    async with (
        await browser.new_context(timezone_id="America/St_Johns", locale="en-GB") as context,
        served(tmp_path) as (control, address),
    ):
        await control.store.append(policy(), etag="", author="me", reason="noon", now=noon)
        page = await context.new_page()
        await page.goto(f"{address}/#policy")
        await page.locator("#revisions-table tr", has_text="noon").get_by_text("01/07/2026, 09:30:00").wait_for()
        assert (await page.locator("#about").inner_text()).endswith("; times of day are those of America/St_Johns")


async def test_views_have_addresses_and_the_back_button_works(browser: Browser, tmp_path: Path) -> None:
    async with browsing(browser) as (page, complaints), served(tmp_path) as (_, address):
        await page.goto(address)
        assert await page.get_by_role("heading", level=2).all_inner_texts() == ["Overview"]
        for name, view in (("Engines", "engines"), ("Policy and rollouts", "policy")):
            await page.get_by_role("link", name=name, exact=True).press("Enter")
            await page.locator(f"#{view}:not(.stale)").wait_for()
            assert await page.get_by_role("heading", level=2).all_inner_texts() == [name]
            assert await page.title() == f"{name} · Meridian"
            assert await page.evaluate(PLACE) == f"H2 {name}", "the keyboard goes on from the view"
            assert await page.locator("nav [aria-current=page]").all_inner_texts() == [name]
        await page.go_back()
        await page.locator("#engines:not(.stale)").wait_for()
        await page.go_back()
        await page.locator("#overview:not(.stale)").wait_for()
        assert await page.title() == "Meridian"
        # An address that no view has is the overview's.
        for name in ("nothing?filter=x", "constructor"):
            await page.goto("about:blank")
            await page.goto(f"{address}/#{name}")
            await page.locator("#overview:not(.stale)").wait_for()
        assert not complaints


async def test_a_large_fleet_is_filtered_and_sorted(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "MAX_ROWS", 3)
    async with (
        browsing(browser) as (page, complaints),
        served(tmp_path) as (control, address),
        AsyncExitStack() as engines,
    ):
        for number in range(6):
            engines.enter_context(LinkedEngine([control.target], f"gpu-{number}", model=f"m{number % 2}"))
        await until(lambda: all(control.connected(f"gpu-{number}") for number in range(6)))
        await page.goto(f"{address}/#engines")
        await page.get_by_text("The first 3 of 6 are shown; filter or sort to see others.").wait_for()
        await page.get_by_role("button", name="Engine").press("Enter")
        await page.get_by_role("button", name="Engine").press("Enter")
        await page.locator("#engines-table tbody tr:first-child", has_text="gpu-5").wait_for()
        assert [row[0] for row in await rows_of(page, "engines")] == ["gpu-5", "gpu-4", "gpu-3"]
        assert page.url.endswith("#engines?engines=-id")
        assert await page.locator("#engines-table th[aria-sort=descending]").inner_text() == "Engine"
        assert await page.evaluate("document.activeElement.textContent") == "Engine"
        await page.get_by_label("Filter").fill("m1")
        await page.get_by_text("3 of 6 engines contain “m1”.").wait_for()
        assert [row[0] for row in await rows_of(page, "engines")] == ["gpu-5", "gpu-3", "gpu-1"]
        assert await page.evaluate("document.activeElement.id") == "filter"
        await page.get_by_label("Filter").fill("nowhere")
        await page.get_by_text("None of 6 engines contains “nowhere”.").wait_for()
        # The address shows the same to others, and the third click takes the order back.
        await page.goto("about:blank")
        await page.goto(f"{address}/#engines?engines=-id&filter=m0")
        await page.get_by_text("3 of 6 engines contain “m0”.").wait_for()
        assert await page.get_by_label("Filter").input_value() == "m0"
        assert [row[0] for row in await rows_of(page, "engines")] == ["gpu-4", "gpu-2", "gpu-0"]
        await page.get_by_role("button", name="Engine").click()
        await page.locator("#engines-table th[aria-sort=descending]").wait_for(state="detached")
        assert page.url.endswith("#engines?filter=m0")
        assert not complaints


async def test_long_texts_stay_in_their_places(browser: Browser, tmp_path: Path) -> None:
    """Engines, clients and operators choose texts, which may have no place to break. None may run as a script."""
    long = "<script>window.ran=1</script><img/src=x/onerror=window.ran=1>" + "x" * 400
    async with browsing(browser) as (page, complaints), served(tmp_path) as (control, address):
        await control.store.append(policy(), etag="", author=long[:200], reason=long, now=utc_now())
        end = utc_now() + timedelta(minutes=5)
        await control.parts.freezes.add_freeze(Match((long[:200],)), end, long[:200], long)
        with LinkedEngine([control.target], long, model=long), LinkedEngine([control.target], "off", fault=long):
            await until(lambda: control.connected(long) and control.connected("off"))
            with LinkedEngine([control.target]) as linked:
                await one_life(control, linked, "mine" + long[:200])
                linked.open("live" + long[:200], tenant=long)
                await linked.steps_until(control.names)
                for view in ("overview", "engines", "requests", "policy", "budgets"):
                    await page.goto(f"{address}/#{view}")
                    await page.locator(f"#{view}:not(.stale)").wait_for()
                    if view == "requests":
                        await page.locator("#ends-table a").click()
                        await page.locator("#life h4").wait_for()
                    for width in (360, 1280):
                        await page.set_viewport_size({"width": width, "height": 800})
                        assert await page.evaluate("document.documentElement.scrollWidth") <= width, (view, width)
                        wide = await page.locator("th, td").evaluate_all(
                            "all => all.filter((e) => e.scrollWidth > e.clientWidth).map((e) => e.className)"
                        )
                        assert wide == [], (view, width)
        assert await page.evaluate("window.ran") is None
        assert not complaints


async def test_a_very_long_text_takes_a_few_lines(browser: Browser, tmp_path: Path) -> None:
    text = ("because " * 125).strip()
    async with browsing(browser) as (page, complaints), served(tmp_path) as (control, address):
        await control.store.append(policy(), etag="", author="me", reason=text, now=utc_now())
        end = utc_now() + timedelta(minutes=5)
        await control.parts.freezes.add_freeze(Match(("frozen",)), end, "me", text)
        with LinkedEngine([control.target], "frozen"), LinkedEngine([control.target], "off", fault=text):
            await until(lambda: control.connected("frozen") and control.connected("off"))
            with LinkedEngine([control.target]) as linked:
                linked.open("ended")
                await linked.steps_until(control.names)
                ending = fleet_pb2.EndThinkingRequest(request_id="ended", reason=text)
                async with calling(control.target) as clients:
                    await clients.fleet.EndThinking(ending)
                await linked.steps_until(lambda: control.engine().ends)
            for view, texts in (("engines", 3), ("requests", 2), ("policy", 1)):
                await page.goto(f"{address}/#{view}")
                await page.locator(f"#{view}:not(.stale)").wait_for()
                if view == "requests":
                    await page.locator("#ends-table a").click()
                    await page.locator("#life h4").wait_for()
                for width in (360, 1280):
                    await page.set_viewport_size({"width": width, "height": 800})
                    rows = page.locator("tbody tr:visible")
                    heights = await rows.evaluate_all("all => all.map((row) => row.offsetHeight)")
                    assert max(heights) < 250, (view, width)
                    # The rest of the text is reached by scrolling.
                    scrolls = page.locator(".text:visible, .cause:visible").filter(has_text=text)
                    beyond = "all => all.filter((e) => e.scrollHeight > e.clientHeight).length"
                    async with asyncio.timeout(30 * BUSY):
                        while await scrolls.evaluate_all(beyond) != texts:
                            await asyncio.sleep(0.01)
                    wide = "all => all.filter((e) => e.scrollWidth > e.clientWidth).map((e) => e.className)"
                    assert await rows.locator("th, td").evaluate_all(wide) == [], (view, width)
        assert not complaints


async def test_links_lead_elsewhere_if_they_are_given(browser: Browser, tmp_path: Path) -> None:
    async with browsing(browser) as (page, complaints), controlling(tmp_path / "meridian.db") as control:
        whole = WholeFleet(control.fleet, "replica-1", None, lambda: True)
        links = {"Grafana": "https://grafana.example/d/meridian?a=1&b=2", "<b>Guide</b>": "http://[::1]:8080/"}
        shown = StatusPage(whole, control.store, RolloutStore(control.store), links=links)
        port = await shown.start("127.0.0.1", 0)
        await page.goto(f"http://127.0.0.1:{port}")
        await page.locator("#links a").first.wait_for()
        found = await page.locator("#links a").evaluate_all("all => all.map(a => [a.textContent, a.href])")
        assert dict(found) == links
        await shown.stop()
        assert not complaints
    async with browsing(browser) as (page, _), served(tmp_path) as (_, address):
        await page.goto(address)
        await page.locator("#overview:not(.stale)").wait_for()
        assert await page.locator("#links").is_hidden()


@asynccontextmanager
async def eventful(control: Control, address: str, page: Page) -> AsyncIterator[LinkedEngine]:
    """Show on the page an engine, a request's life, a rollout, a freeze and an engine whose agent is off."""
    plan = Plan.model_validate({"step": [{"percent": 0, "bake_s": 60}, {"percent": 100}], "guardrails": {"nacks": 0}})
    fleet = control.fleet
    whole = WholeFleet(fleet, "replica-1", None, lambda: True)
    times = [utc_now(), utc_now(), utc_now() + timedelta(seconds=STORE_S)]
    rollouts = Rollouts(RolloutStore(control.store), fleet, lambda: times.pop(0), whole.led_engines)
    with (
        LinkedEngine([control.target]) as linked,
        LinkedEngine([control.target], "broken", fault="on_step: KeyError: 7"),
    ):
        await one_life(control, linked)
        linked.open("live")
        candidate = policy(scheduler={"max_think_tokens": 9})
        await rollouts.store.start(plan, candidate, "", By(utc_now(), "mara", "shorter"))
        await rollouts.tick()
        await rollouts.tick()
        end = utc_now() + timedelta(minutes=25.5)
        await control.parts.freezes.add_freeze(Match(("eng*",)), end, "joao", "an incident")
        await linked.steps_until(lambda: control.engine().freeze.confirmed)
        await page.goto(f"{address}/#requests?id=mine")
        await page.locator("#life h4").wait_for()
        yield linked


async def test_changes_under_way_are_shown_with_their_causes(browser: Browser, tmp_path: Path) -> None:
    async with browsing(browser) as (page, complaints), served(tmp_path) as (control, address):
        async with eventful(control, address, page):
            for line in ("with the agent off: broken.", "Freeze 1 of eng*, ", "an incident.", "Rollout 1 is running"):
                await page.goto(f"{address}/#overview")
                await page.locator("#attention li", has_text=line).wait_for()
            await page.goto(f"{address}/#engines")
            await page.locator("#engines-table tr", has_text="frozen").get_by_text("an incident").wait_for()
            await page.locator("#engines-table tr", has_text="off").get_by_text("KeyError: 7").wait_for()
            (freeze,) = await rows_of(page, "freezes")
            assert freeze[1:4] == ["eng*", "25 min", "1 of 1 engine"]
            await page.goto(f"{address}/#policy")
            await page.locator("#policy:not(.stale)").wait_for()
            assert await page.locator("#rollout-heading").inner_text() == "Rollout 1: running, step 1 of 2"
            about = await page.locator("#rollout-about").inner_text()
            assert "with the candidate" in about
            assert about.endswith("Started by mara: shorter.")
            assert "watched" in await page.locator("#rollout-steps [aria-current=step]").inner_text()
            (rollout,) = await rows_of(page, "rollouts")
            assert str(utc_now().year) in rollout[4], "a rollout may be days old"
            # The candidate shortens thinking, so it has a limit for harm, which nothing has measured yet.
            harm, nacks = await rows_of(page, "guardrails")
            assert harm[:5] == ["harm_rate", "not measured", "not measured", "0.01", "0"]
            assert nacks[:5] == ["nacks", "within", "0", "0", "0"]
            assert "NaN" not in await page.locator("main").inner_text()
        assert not complaints


async def test_a_line_that_changes_keeps_the_focus(browser: Browser, tmp_path: Path) -> None:
    async with browsing(browser) as (page, complaints), served(tmp_path) as (control, address):
        end = utc_now() + timedelta(seconds=110)
        await control.parts.freezes.add_freeze(Match(("eng*",)), end, "joao", "an incident")
        await page.goto(address)
        link = page.locator("#attention li", has_text="Freeze 1 of").get_by_role("link")
        await link.focus()
        before = await link.get_attribute("aria-label")
        await page.wait_for_function("(old) => document.querySelector('#attention a').ariaLabel !== old", arg=before)
        assert "Freeze 1 of" in await page.evaluate(PLACE)
        assert not complaints


async def test_a_load_is_followed_from_a_tenant_to_a_request(browser: Browser, tmp_path: Path) -> None:
    async with browsing(browser) as (page, complaints), served(tmp_path) as (control, address):
        entry = {"name": "acme", "tenant": "acme", "tokens_per_minute": 60, "max_think_tokens": 5, "shadow": False}
        await control.set_policy(policy(scheduler={"max_think_tokens": 2000}, budget=[entry]))
        with LinkedEngine([control.target]) as linked:
            for number, tenant in enumerate(("acme", "acme", "globex")):
                linked.open(f"{tenant}-{number}", tenant=tenant)
            await linked.steps_until(lambda: sum(r.think_tokens for r in requests_of(control.fleet)) >= 300)
            await control.fleet.part(BudgetSharing).tick()
            await page.goto(f"{address}/#overview")
            await page.locator("#tiles div", has_text="Thinking now").locator("dd.think", has_text="3").wait_for()
            await page.locator("#attention li", has_text="Budget acme shortens thinking").get_by_role("link").click()
            await page.locator("#budgets-table .bad", has_text="floor").wait_for()
            ((_, requests, stage, *_),) = await rows_of(page, "budgets")
            assert (requests, stage) == ("tenant acme", "floor")
            assert [row[0] for row in await rows_of(page, "tenants")] == ["acme", "globex"]
            await page.get_by_role("link", name="globex").click()
            await page.get_by_text("1 of 3 requests contain “globex”.").wait_for()
            assert await page.locator("#phases dd.think").inner_text() == "3", "the filter is one of tables alone"
            ((_, request, tenant, phase, tokens, *_),) = await rows_of(page, "requests")
            assert (request, tenant, phase, int(tokens) >= 100) == ("globex-2", "globex", "thinking", True)
            await page.get_by_role("link", name="globex-2").click()
            await page.locator("#life-about", has_text="Live").wait_for()
            assert "tenant globex" in await page.locator("#life-about").inner_text()
        await page.locator("#life-about", has_text="End unknown, because the stream is lost").wait_for()
        assert not complaints


async def test_the_page_stands_still_while_it_is_paused(browser: Browser, tmp_path: Path) -> None:
    async with browsing(browser) as (page, _), served(tmp_path) as (control, address):
        await page.goto(f"{address}/#engines")
        await page.get_by_text("No engine has connected.").wait_for()
        await page.get_by_role("button", name="Pause updates").press("Enter")
        with LinkedEngine([control.target]):
            await until(control.connected)
            await another_update(page)
            assert await page.get_by_text("No engine has connected.").is_visible()
            # Whoever asks for something else gets it, once.
            await page.goto(f"{address}/#engines?filter=engine")
            await page.locator("#engines-table .state", has_text="ready").wait_for()
            await page.get_by_role("button", name="Pause updates").press("Enter")
            await page.locator("#connection-text", has_text="live").wait_for()


# The width changes what is shown, and the scheme the colours, one without the other.
LOOKS: tuple[tuple[Literal["light", "dark"], int, dict[str, Any]], ...] = (
    ("light", 1280, {}),
    ("light", 360, {"runOnly": ["scrollable-region-focusable", "target-size"]}),
    ("dark", 1280, {"runOnly": ["color-contrast"]}),
)
VIEWS = ("overview", "engines?filter=e&engines=-id", "requests?id=mine", "policy", "budgets")


async def test_everything_is_reached_by_tab(browser: Browser, tmp_path: Path) -> None:
    async with browsing(browser) as (page, _), served(tmp_path) as (control, address), eventful(control, address, page):
        for view in VIEWS:
            await page.goto(f"{address}/#{view}")
            await page.locator(f"#{view.partition('?')[0]}:not(.stale)").wait_for()
            await page.evaluate("document.activeElement.blur()")
            wanted = await page.evaluate(
                "[...document.querySelectorAll('a, button, input, .scroll')].filter((e) => !e.closest('[hidden]'))"
                f".map({NAME})"
            )
            reached = []
            for _ in range(len(wanted) + 9):
                await page.keyboard.press("Tab")
                reached.append(await page.evaluate(PLACE))
            assert set(wanted) <= set(reached), f"Tab does not reach every control of {view}"
            assert await page.locator("a.skip").evaluate("e => e.getBoundingClientRect().right") < 0
        await page.locator("a.skip").focus()
        await page.keyboard.press("Enter")
        assert await page.evaluate(PLACE) == "H2 Budgets and tenants"


async def test_what_a_screen_reader_needs_is_there(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The axe checker finds no violation on any view, wide and narrow, nor in the colours of the dark scheme; nothing
    is wider than a phone's screen."""
    from axe_playwright_python.async_playwright import Axe  # type: ignore[import-untyped]

    monkeypatch.setattr(server, "PERIOD_S", 0.25)
    async with browsing(browser) as (page, _), served(tmp_path) as (control, address), eventful(control, address, page):
        # A page reads the last hour when it is opened and every 15 s from then on, and draws it from two points on.
        while len(await (await page.request.get(f"{address}/history")).json()) < 2:
            await asyncio.sleep(0.02)
        await page.goto("about:blank")
        for view in VIEWS:
            await page.goto(f"{address}/#{view}")
            await page.locator(f"#{view.partition('?')[0]}:not(.stale)").wait_for()
            ready = {"overview": "#history svg", "requests?id=mine": "#life h4"}
            await page.locator(ready.get(view, "h2:visible")).first.wait_for()
            for scheme, width, options in LOOKS:
                await page.emulate_media(color_scheme=scheme)
                await page.set_viewport_size({"width": width, "height": 800})
                assert await page.evaluate("document.documentElement.scrollWidth") <= width, (view, width)
                found = await Axe().run(page, options={"resultTypes": ["violations"], **options})
                violations = [(v["id"], [n["html"] for n in v["nodes"]]) for v in found.response["violations"]]
                assert (view, scheme, width, violations) == (view, scheme, width, [])
