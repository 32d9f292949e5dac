"""A real engine whose control plane has another version, or is no control plane: no request fails.

Decisions are applied as far as both versions understand them, and the engine returns to its own control plane by
itself.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from meridian.v1 import agent_pb2, fleet_pb2

from meridian_agent.link import inbox
from meridian_agent.link.inbox import INBOX_MESSAGES
from tests.chaos.foreign import FLOOD, FOREIGN_REVISION
from tests.chaos.versions import FIRST_VERSION, NEXT_VERSION
from tests.engine import FIRST_TOKENS, Run, cases, chat, paced
from tests.engine.pacing import Settled
from tests.engine.policies import DENSE
from tests.engine.test_equality import GREEDY
from tests.engine.test_fail_static import CAPPED
from tests.engine.test_inner_faults import MAX_GROWTH_MB, UNRULED, capped_again, rss_mb
from tests.processes import Control, Process, free_port, wait_for

CAP: int = CAPPED["scheduler"]["max_think_tokens"]
# Decisions after which a flood ends its stream here.
MOST_DECISIONS = 30 * FLOOD


def lead(link: Any, targets: list[str]) -> None:
    """Let the agent connect to these targets, and wait until it has."""
    before, link._targets = link._call, targets
    link.restart()
    wait_for(lambda: link._call is not before and link.lease.connected, 20, "the other server's welcome")


@contextlib.contextmanager
def led_to(agent: Any, folder: Path, kind: str, *target: str) -> Iterator[Process]:
    """Run such a program with the agent's stream inside the block; afterwards return the agent to its control plane."""
    link, targets, address = agent.link, agent.link._targets, f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "tests.chaos.foreign", kind, address, *target]
    process = Process(command, folder / f"foreign-{kind}.log")
    try:
        wait_for(lambda: "ready" in process.output(), 20, f"{kind} to answer")
        lead(link, [address])
        yield process
    finally:
        process.kill()
        lead(link, targets)


def explained(own: list[int], stock: list[int], end: int) -> bool:
    """Return whether a request's tokens are stock's, or stock's up to the token at which a cap ended its thinking."""
    common = next((i for i, (a, b) in enumerate(zip(own, stock, strict=False)) if a != b), None)
    return own == stock or (common is not None and common >= CAP and own[common] == end)


@pytest.mark.parametrize(("kind", "version"), [("older", FIRST_VERSION), ("newer", NEXT_VERSION)])
def test_another_version(  # noqa: PLR0917
    llm: Any,
    agent: Any,
    control: Control,
    settled: Settled,
    stock: list[list[int]],
    folder: Path,
    kind: str,
    version: str,
) -> None:
    """To each other, the agent and the control plane appear older or newer, and everything that both know goes on
    working.

    The first version had the cap in a decision instead of in its settings, so the cap comes a little later.
    """
    control.apply(CAPPED)
    capped, end = chat(llm, cases(), GREEDY), agent.tracker.markers.end[0]
    with led_to(agent, folder, kind, control.target):
        engine = wait_for(lambda: (e := control.engine()).agent_version == version and e, 20, "its Hello")
        assert engine.vllm_version
        wait_for(lambda: control.engine().acked_revision, 20, "the policy to hold")
        said = paced(llm, cases(), GREEDY, settled)
        assert all(explained(own, all_of_it, end) for own, all_of_it in zip(said, stock, strict=True))
        assert said == capped if kind == "newer" else said != stock
        control.apply(DENSE)
        assert paced(llm, cases(), GREEDY, settled) == stock
        engine = control.settled()
        assert (engine.fault, engine.nack_error, engine.open_decisions) == ("", "", 0)
        assert engine.decisions["probe"] > 0
    control.apply(UNRULED)
    capped_again(llm, agent, control)


def told(process: Process) -> dict[str, int]:
    """Return the newest counts that `foreign.Decisions` printed."""
    lines = [line for line in process.output().splitlines() if line.startswith("{")]
    found: dict[str, int] = json.loads(lines[-1]) if lines else {"made": 0}
    return found


def test_decisions_about_nobody(llm: Any, agent: Any, control: Control, stock: list[list[int]], folder: Path) -> None:
    """Each decision for an unused slot, or for an ended request whose slot has another one, is answered once, as gone.

    No such decision changes a token.
    """
    control.apply(UNRULED)
    with led_to(agent, folder, "stray") as process:
        wait_for(lambda: agent.link.lease.revision == FOREIGN_REVISION, 20, "its settings to be in force")
        here = fleet_pb2.CONNECTION_STATE_CONNECTED, agent_pb2.AGENT_STATE_READY

        def away() -> bool:
            states = {(engine.state, engine.agent_state) for engine in control.engines()}
            return bool(states) and here not in states

        wait_for(away, 20, "its stream to end")
        # There are more requests than places, so that slots are used again.
        assert chat(llm, cases() * 2, GREEDY) == stock * 2

        def settled() -> dict[str, int] | None:
            outcomes = told(process)
            made = outcomes.pop("made")
            return outcomes if 0 < made == sum(outcomes.values()) else None

        outcomes = wait_for(settled, 20, "every decision to have its outcome")
        assert set(outcomes) == {"OUTCOME_REQUEST_GONE"}
    capped_again(llm, agent, control)


def test_a_flood_of_decisions(  # noqa: PLR0917
    llm: Any,
    agent: Any,
    control: Control,
    stock: list[list[int]],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Queues are bounded, a stream that sends too much is ended with a log line, and no token changes."""
    control.apply(UNRULED)
    monkeypatch.setattr(inbox, "INBOX_DECISIONS", MOST_DECISIONS)
    link, before = agent.link, rss_mb()
    logger = logging.getLogger("vllm.meridian")
    logger.addHandler(caplog.handler)
    messages, decisions = [0], [0]
    try:
        with led_to(agent, folder, "flood"):
            run = Run(llm)
            while "too many messages or decisions" not in caplog.text:
                # The stream may end during a request or not.
                for i, case in enumerate(cases()):
                    run.add(f"{len(run.finished)}-{i}", case, GREEDY.clone())
                while llm.llm_engine.has_unfinished_requests():
                    run.step()
                    messages.append(len(link.inbox.messages))
                    decisions.append(link.inbox._in - link.inbox._out)
                assert len(run.finished) < 100 * len(stock), "the flood's stream was not ended"
            assert list(run.tokens.values()) == stock * (len(run.tokens) // len(stock))
            assert {len(tokens) <= FIRST_TOKENS for tokens in run.tokens.values()} == {True}
    finally:
        logger.removeHandler(caplog.handler)
    assert max(messages) <= INBOX_MESSAGES + 1
    assert FLOOD < max(decisions) <= MOST_DECISIONS
    assert "opening a new stream" in caplog.text
    capped_again(llm, agent, control)
    assert rss_mb() - before < MAX_GROWTH_MB
