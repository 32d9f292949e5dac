"""The status page: the data that it gets over HTTP, and what a browser shows."""

from __future__ import annotations

import asyncio
import itertools
import json
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import aiohttp
from meridian.v1 import agent_pb2

from meridian_control.capabilities.control_group.fleet import Comparisons
from meridian_control.common.errors import StoreUnavailable
from meridian_control.engine.freeze_state import Match
from meridian_control.fleet.whole_fleet import WholeFleet
from meridian_control.page import server
from meridian_control.page.server import FILES, MAX_VIEWERS, StatusPage
from meridian_control.policy.shortening_kinds import ENTROPY
from meridian_control.policy.store import PolicyStore
from meridian_control.rollout.driver import STORE_S, Rollouts
from meridian_control.rollout.plan import Plan
from meridian_control.rollout.state import By
from meridian_control.rollout.store import RolloutStore
from tests.contract.control.journal.test_why import one_life
from tests.contract.streams import Control, call_to, controlling
from tests.fakes.agent import hello
from tests.fakes.control import utc_now
from tests.fakes.linked import LinkedEngine, until
from tests.fakes.tables import policy
from tests.needed import CHROMIUM

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    import pytest
    from playwright.async_api import Page

# JavaScript that names an element of the page, and JavaScript that names the element with the focus.
NAME = "(e) => `${e.tagName} ${e.id || e.textContent.slice(0, 40)}`"
PLACE = f"({NAME})(document.activeElement)"


@asynccontextmanager
async def served(path: Path) -> AsyncIterator[tuple[Control, str]]:
    """Yield a control plane that serves its status page, and the page's address."""
    async with controlling(path / "meridian.db") as control:
        await control.set_policy(policy(scheduler={"max_think_tokens": 5}))
        whole = WholeFleet(control.fleet, "replica-1", None, lambda: True)
        page = StatusPage(whole, control.store, RolloutStore(control.store))
        port = await page.start("127.0.0.1", 0)
        try:
            yield control, f"http://127.0.0.1:{port}"
        finally:
            await page.stop()
            assert page._looking is None or page._looking.done(), "the page still reads the store"


async def first_event(session: aiohttp.ClientSession, address: str) -> dict[str, Any]:
    async with session.get(f"{address}/events") as stream:
        assert stream.content_type == "text/event-stream"
        line = await stream.content.readline()
        return dict(json.loads(line.removeprefix(b"data: ")))


async def test_what_the_page_is_told(tmp_path: Path) -> None:
    async with served(tmp_path) as (control, address), aiohttp.ClientSession() as session:
        empty = await first_event(session, address)
        assert (empty["engines"], empty["requests"], empty["ends"], empty["rollouts"]) == ([], [], [], [])
        assert [r["revision"] for r in empty["revisions"]] == [2, 1]
        with LinkedEngine([control.target]) as linked:
            await one_life(control, linked)
            linked.open("live", tenant="acme")
            await linked.steps_until(lambda: "live" in control.names())
            told = await first_event(session, address)
        nobody = {"new": 0, "generating": 0, "preempted": 0}
        phases = told["totals"].pop("phases")
        assert (phases["prompt"], phases["output"], sum(phases["think"].values())) == (nobody, nobody, 1)
        assert told["totals"] == {
            "engines": 1,
            "gone": 0,
            "troubled": 0,
            "waiting": 0,
            "ended": {"hard_cap": 1},
            "output_critical": 0,
        }
        (engine,) = told["engines"]
        assert (engine["id"], engine["word"], engine["level"], engine["acked_revision"]) == ("engine", "ready", "", 2)
        assert [(r["revision"], r["engines"]) for r in told["revisions"]] == [(2, 1), (1, 0)]
        (live,) = told["requests"]
        assert (live["id"], live["tenant"], live["phase"]) == ("live", "acme", "think")
        assert [(d["kind"], d["outcome"]) for d in told["ends"]] == [("cap", "OUTCOME_APPLIED")]
        async with session.get(f"{address}/request", params={"id": "mine"}) as found:
            life = (await found.json())["life"]
        assert (life["request_id"], life["think_tokens"] >= 5) == ("chatcmpl-mine-9f", True)
        assert life["events"][0]["kind"] == "opened"
        async with session.get(f"{address}/request", params={"id": "nobody"}) as missing:
            assert (missing.status, "nobody" in (await missing.json())["error"]) == (404, True)


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
            told = await first_event(session, address)
            shown = told["requests"][0]["id"]
            assert shown == r"r\u202egnp.exe\x1b[31m\nCRITICAL"
            assert hostile not in json.dumps(told, ensure_ascii=False)
            for asked in (shown, hostile):
                async with session.get(f"{address}/request", params={"id": asked}) as found:
                    assert (await found.json())["life"]["request_id"] == shown
        async with session.get(f"{address}/request", params={"id": hostile + "?"}) as missing:
            assert r"\u202e" in (await missing.json())["error"]


async def test_engines_are_shown_while_the_database_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(tmp_path) as (control, address), aiohttp.ClientSession() as session:
        with LinkedEngine([control.target]):
            await until(control.connected)

            async def away(*_: object) -> None:
                raise StoreUnavailable("policy store: connection refused")

            monkeypatch.setattr(PolicyStore, "history", away)
            told = await first_event(session, address)
        assert [engine["id"] for engine in told["engines"]] == ["engine"]
        assert "revisions" not in told
        assert "connection refused" in told["store_trouble"]


async def test_the_page_compares_treated_requests_with_the_control_group(tmp_path: Path) -> None:
    async with served(tmp_path) as (control, address), aiohttp.ClientSession() as session:
        stored = await control.set_policy(policy(entropy={"shadow": False}))
        experiment = control.fleet.part(Comparisons).experiments.experiment_of(stored.revision, stored.policy)
        for arm, tokens in ((experiment.treated, 50), (experiment.control, 100)):
            arm.requests, arm.think_tokens, arm.think_tokens_squares = 40, 40 * tokens, 41.0 * tokens**2
        for judged in (experiment, experiment.kinds[ENTROPY]):
            judged.judged, judged.judged_stops, judged.harmful = 40, 40, 20
        experiment.forced_ends.ends, experiment.forced_ends.reentries, experiment.natural_ends.ends = 30, 12, 30
        told = await first_event(session, address)
        (row,) = told["savings"]
        assert (row["in_force"], row["since_revision"]) == (True, str(stored.revision))
        assert row["saved_ratio"]["value"] == 0.5
        assert row["harm_ratio"]["low"] < 0.5 < row["harm_ratio"]["high"]
        assert (row["forced_ends"]["reentries"], row["natural_ends"]["long_answers"]) == ("12", "0")
        assert row["spills"]["value"] == 0.4
        assert told["withdrawn"] == ""
        (kind,) = row["kinds"]
        assert (kind["text"], kind["level"]) == ("the entropy rules", "bad")
        assert kind["harm"].startswith("50.00 %, at most 6")
        assert told["totals"]["troubled"] == len(told["harm"]) == 1
        assert told["harm"][0].startswith("the entropy rules would have changed 20 of 40 answers")
        await control.fleet.part(Comparisons).tick()
        text = (await first_event(session, address))["withdrawn"]
        assert text.startswith(f"Revision {stored.revision + 1} withdrew what did harm: the entropy rules: 20 of 40")
        assert (await first_event(session, address))["totals"]["troubled"] == 0


async def test_a_number_that_a_page_cannot_read_is_named_as_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unreadable(*_: object) -> dict[str, Any]:
        return {"engines": [{"rate": float("nan")}]}

    monkeypatch.setattr(server, "contents", unreadable)
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


@asynccontextmanager
async def browsing() -> AsyncIterator[tuple[Page, list[str]]]:
    """Yield a page in a headless Chromium, and the list of the page's errors and warnings."""
    chromium = CHROMIUM.require()
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = await browser.new_page()
        complaints: list[str] = []
        page.on("console", lambda m: complaints.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda e: complaints.append(str(e)))
        try:
            yield page, complaints
        finally:
            await browser.close()


async def test_a_viewer_that_reads_nothing_loses_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A suspended computer keeps its connection open."""
    monkeypatch.setattr(server, "MAX_VIEWERS", 1)
    monkeypatch.setattr(server, "UNREAD_S", 0.05)
    monkeypatch.setattr(server, "INTERVAL_S", 0.0)

    async def large(*_: Any) -> dict[str, Any]:
        return {"text": "x" * (1 << 20)}

    async with served(tmp_path) as (_, address), aiohttp.ClientSession() as session:
        monkeypatch.setattr(server, "contents", large)
        silent = await session.get(f"{address}/events")
        while (answer := await session.get(f"{address}/events")).status == 503:
            answer.close()
            await asyncio.sleep(0.01)
        assert answer.status == 200
        answer.close()
        silent.close()


async def test_a_browser_shows_it_live(tmp_path: Path) -> None:
    async with browsing() as (page, complaints), served(tmp_path) as (control, address):
        await page.goto(address)
        await page.get_by_text("No engine has connected.").wait_for()
        with LinkedEngine([control.target]) as linked:
            await one_life(control, linked)
            await page.locator("#summary", has_text="1 engine connected, none in trouble, policy revision 2").wait_for()
            await page.locator("#engines td", has_text="hard cap 1").wait_for()
            await page.locator("#connection-text", has_text="live").wait_for()
        await page.locator("#engines .state .warn", has_text="gone").wait_for()
        await page.locator("#engines .cause", has_text="its last decisions are in force").wait_for()
        assert not complaints


async def test_the_last_hour_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests, tokens, delays and the agent's share are lines, and a revision is a mark, also of a time before the
    page was opened."""
    monkeypatch.setattr(server, "PERIOD_S", 0.05)
    async with served(tmp_path) as (control, address), browsing() as (page, complaints):
        with LinkedEngine([control.target]) as linked:
            await one_life(control, linked)
            async with aiohttp.ClientSession() as session:

                async def points() -> list[dict[str, Any]]:
                    async with session.get(f"{address}/history") as answer:
                        return list(await answer.json())

                while (await points())[-1]["revision"] != control.fleet.revision:
                    await asyncio.sleep(0.02)
                await control.set_policy(policy(scheduler={"max_think_tokens": 7}))
                while (await points())[-1]["revision"] != control.fleet.revision:
                    await asyncio.sleep(0.02)
                assert any(p["tokens_per_s"] for p in await points())
            await page.goto(address)
            charts = page.locator("#history svg")
            await charts.nth(3).wait_for()
            told = [await charts.nth(number).get_attribute("aria-label") for number in range(4)]
            assert [(text or "").partition(" in the last hour")[0] for text in told] == [
                *("Live requests", "Tokens per second", "Delays of answers, P99"),
                "Agent, of a thread",
            ]
            assert await page.locator("#history svg line.revision title", has_text="policy revision").count() >= 1
            assert await page.locator("#history polyline.think").count() >= 1
            assert await page.locator("#history-ends", has_text="hard cap 1").is_visible()
        assert not complaints


async def test_no_number_is_shown_while_the_control_plane_is_gone(tmp_path: Path) -> None:
    async with browsing() as (page, _), controlling(tmp_path / "meridian.db") as control:
        await control.set_policy(policy())
        whole = WholeFleet(control.fleet, "replica-1", None, lambda: True)
        shown = StatusPage(whole, control.store, RolloutStore(control.store))
        port = await shown.start("127.0.0.1", 0)
        await page.goto(f"http://127.0.0.1:{port}")
        await page.locator("#connection-text", has_text="live").wait_for()
        assert await page.locator("main").is_visible()
        await shown.stop()
        await page.locator("#gone", has_text="The control plane does not answer, so nothing is shown.").wait_for()
        assert await page.locator("#gone", has_text="heard from it last at").is_visible()
        assert not await page.locator("main").is_visible()
        again = StatusPage(whole, control.store, RolloutStore(control.store))
        await again.start("127.0.0.1", port)
        await page.locator("#connection-text", has_text="live").wait_for()
        await page.locator("main").wait_for()
        assert not await page.locator("#gone").is_visible()
        await again.stop()


async def test_a_request_is_found_by_keyboard_and_its_life_shown(tmp_path: Path) -> None:
    async with browsing() as (page, complaints), served(tmp_path) as (control, address):
        with LinkedEngine([control.target]) as linked:
            await one_life(control, linked)
            await page.goto(address)
            link = page.locator("#forces a", has_text="chatcmpl-mine-9f").first
            await link.wait_for()
            await link.focus()
            await page.keyboard.press("Enter")
            await page.locator("#life h3", has_text="chatcmpl-mine-9f on engine").wait_for()
            focused = await page.evaluate("document.activeElement.id")
            assert focused == "request-heading"
            bar = page.locator("#life .bar")
            assert "think" in (await bar.get_attribute("aria-label") or "")
            events = await page.locator("#life-events tbody tr").all_inner_texts()
            assert any("cap: hard cap" in e and "scheduler.max_think_tokens" in e for e in events)
            spans = await page.locator("#life-spans li").all_inner_texts()
            assert [s.partition(" ")[0] for s in spans[:2]] == ["thinking", "answering"]
            # An update of the rows does not move the focus.
            await page.locator("#request-id").focus()
            await page.keyboard.type("x")
            await asyncio.sleep(1.5)
            assert await page.evaluate("document.activeElement.id") == "request-id"
            await page.locator("#request-id").fill("nobody")
            await page.keyboard.press("Enter")
            await page.locator("#life-error", has_text="nobody").wait_for()
            assert await page.locator("#life").is_hidden()
        assert [c for c in complaints if "404" not in c] == []


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
        await page.goto(f"{address}/#request=mine")
        await page.locator("#life h3").wait_for()
        yield linked


async def test_changes_under_way_are_shown_with_their_causes(tmp_path: Path) -> None:
    async with browsing() as (page, complaints), served(tmp_path) as (control, address):
        async with eventful(control, address, page):
            await page.locator("#engines tr", has_text="frozen").get_by_text("an incident").wait_for()
            await page.locator("#engines tr", has_text="off").get_by_text("KeyError: 7").wait_for()
            freeze = await page.locator("#freezes tbody tr").inner_text()
            assert freeze.split("\t")[1:4] == ["eng*", "25 min", "1 of 1 engine"]
            assert await page.locator("#rollout-heading").inner_text() == "Rollout 1: running, step 1 of 2"
            assert "watched" in await page.locator("#rollout-steps [aria-current=step]").inner_text()
            guardrails = [row.split("\t") for row in await page.locator("#guardrails tbody tr").all_inner_texts()]
            # The candidate shortens thinking, so it has a limit for harm, which nothing has measured yet.
            harm, nacks = guardrails
            assert harm[:5] == ["harm_rate", "not measured", "not measured", "0.01", "0"]
            assert nacks[:5] == ["nacks", "within", "0", "0", "0"]
            assert "NaN" not in await page.locator("main").inner_text()
        assert not complaints


async def test_the_page_stands_still_while_it_is_paused(tmp_path: Path) -> None:
    async with browsing() as (page, _), served(tmp_path) as (control, address):
        await page.goto(address)
        await page.get_by_text("No engine has connected.").wait_for()
        await page.get_by_role("button", name="Pause updates").press("Enter")
        with LinkedEngine([control.target]):
            await until(control.connected)
            # Another viewer has received two more updates, so the page has received them too.
            await page.evaluate(
                "new Promise((two) => { let n = 0; new EventSource('events').onmessage = () => ++n > 1 && two(); })"
            )
            assert await page.locator("#engines td.empty").is_visible()
            await page.get_by_role("button", name="Pause updates").press("Enter")
            await page.locator("#engines .state", has_text="ready").wait_for()


async def test_everything_is_reached_by_tab(tmp_path: Path) -> None:
    async with browsing() as (page, _), served(tmp_path) as (control, address), eventful(control, address, page):
        await page.evaluate("document.activeElement.blur()")
        reached, here = [], "null"
        while here not in reached:
            reached.append(here)
            await page.keyboard.press("Tab")
            here = await page.evaluate(PLACE)
        wanted = await page.evaluate(
            "[...document.querySelectorAll('a, button, input, .scroll')].filter((e) => !e.closest('[hidden]'))"
            f".map({NAME})"
        )
        assert set(wanted) <= set(reached), "Tab does not reach every control"
        assert await page.locator("a.skip").evaluate("e => e.getBoundingClientRect().right") < 0


async def test_what_a_screen_reader_needs_is_there(tmp_path: Path) -> None:
    """The axe checker finds no violation in both colour schemes, wide and narrow; nothing is wider than a phone's
    screen."""
    from axe_playwright_python.async_playwright import Axe  # type: ignore[import-untyped]

    async with browsing() as (page, _), served(tmp_path) as (control, address), eventful(control, address, page):
        schemes: tuple[Literal["light", "dark"], ...] = ("light", "dark")
        for scheme, width in itertools.product(schemes, (1280, 360)):
            await page.emulate_media(color_scheme=scheme)
            await page.set_viewport_size({"width": width, "height": 800})
            await page.goto(f"{address}/#request=mine")
            await page.locator("#life h3").wait_for()
            found = await Axe().run(page)
            violations = [(v["id"], [n["html"] for n in v["nodes"]]) for v in found.response["violations"]]
            assert violations == []
            assert await page.evaluate("document.documentElement.scrollWidth") <= width
