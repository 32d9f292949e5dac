"""One real vLLM engine in this process, governed by a real meridian-control, for the whole session of tests.

The engine core runs in-process (its worker is a process of its own), so that tests can look at the scheduler.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from meridian_agent.link import control_stream
from tests.engine import ENGINE_ARGS, cases, chat, confirmed, rebuild
from tests.engine.pacing import SOON_S, Settled
from tests.engine.policies import NEUTRAL
from tests.engine.served import APART, CLASS, KEEPS, REASONING, STRIPS, SWITCH, TENANT, TURNS, Client, governed
from tests.processes import ENGINE_ENV, MODEL, Answering, Control, free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm import LLM

    from tests.engine.served import Served


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.engine)
            # vLLM and its dependencies give many warnings, which are not errors of the agent.
            item.add_marker(pytest.mark.filterwarnings("ignore"))


class ControlWithPrimes(Control):
    module = "tests.primes"


@pytest.fixture(autouse=True)
def _connects_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let agents in this process pause for a moment only between streams; many tests wait for the next stream."""
    monkeypatch.setattr(control_stream, "BACKOFF_S", SOON_S)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="session")
def control(folder: Path) -> Iterator[Control]:
    control = Answering(folder, options=["--metrics-listen", f"127.0.0.1:{free_port()}"])
    yield control
    control.process.stop()


@pytest.fixture(scope="session")
def llm(stock_tokens: Path, control: Control) -> Iterator[LLM]:
    os.environ.update(ENGINE_ENV)
    os.environ.update(
        MERIDIAN_CONTROL=control.target,
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_ALLOW_INSECURE_SERIALIZATION="1",
    )
    import torch
    import vllm
    import vllm.plugins

    # vLLM loads its plugins only once, and a test before may have had it load them without a control plane.
    vllm.plugins.plugins_loaded = False

    # On shared cores several threads of one engine wait for each other at every operation.
    torch.set_num_threads(1)
    llm = vllm.LLM(**ENGINE_ARGS)
    control.engine()
    control.caught_up = Settled(llm.llm_engine.engine_core.engine_core.scheduler)
    # The engine's many objects stay until the end, so no garbage collection needs to look at them.
    gc.freeze()
    yield llm
    llm.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="session")
def scheduler(llm: LLM) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


@pytest.fixture(scope="session")
def settled(scheduler: Any) -> Settled:
    """Return an object that waits until all reports are answered."""
    return Settled(scheduler)


@pytest.fixture(scope="session")
def switched_template(folder: Path) -> Path:
    """Return the file of the model's chat template with a switch by which turns keep their thinking."""
    text = (MODEL / "chat_template.jinja").read_text()
    assert STRIPS in text
    made = folder / "switched.jinja"
    made.write_text(text.replace(STRIPS, SWITCH))
    return made


@pytest.fixture(scope="session")
def switched(folder: Path, switched_template: Path) -> list[str]:
    """Return the options of a server whose model has that template, and which takes prompts that are embeddings."""
    made = folder / "switched"
    shutil.copytree(MODEL, made)
    shutil.copy(switched_template, made / "chat_template.jinja")
    return ["--model", str(made), *TURNS, "--enable-prompt-embeds"]


@pytest.fixture(scope="session")
def apart_server(folder: Path, switched: list[str]) -> Iterator[tuple[Served, Control]]:
    """Yield a server whose front end, engine core and worker are processes of their own, with the options `switched`,
    and its control plane, which has the capability of `tests.primes`."""
    with governed(folder / "apart", switched, {**APART, "VLLM_SERVER_DEV_MODE": "1"}, kind=ControlWithPrimes) as both:
        yield both


@pytest.fixture(scope="session")
def by_default_server(folder: Path, switched_template: Path) -> Iterator[tuple[Served, Control]]:
    """Yield a server whose own template and default settings keep thinking, and which takes the tenant from `user` and
    the SLO class from nowhere, and its control plane."""
    options = [*TURNS, "--chat-template", str(switched_template)]
    options += ["--default-chat-template-kwargs", json.dumps({**KEEPS, "reasoning_effort": "low"})]
    more = {"MERIDIAN_TENANT_FROM": "user", "MERIDIAN_SLO_CLASS_FROM": "api_key"}
    with governed(folder / "by-default", options, more) as both:
        yield both


@pytest.fixture(scope="session")
def fronts_server(folder: Path) -> Iterator[tuple[Served, Control]]:
    """Yield a server with two API server processes, whose gateway names tenants and SLO classes in headers, and in
    which vLLM closes thinking with a text, and its control plane."""
    options = ["--api-server-count", "2", "--reasoning-config", REASONING]
    more = {"MERIDIAN_TENANT_FROM": f"header:{TENANT}", "MERIDIAN_SLO_CLASS_FROM": f"header:{CLASS}"}
    with governed(folder / "fronts", options, {**APART, "VLLM_CPU_OMP_THREADS_BIND": "nobind", **more}) as both:
        yield both


def anew(both: tuple[Served, Control]) -> tuple[Served, Control]:
    """Return a server and its control plane once nothing of earlier tests is in force."""
    _, control = both
    control.thaw()
    control.apply({})
    return both


@pytest.fixture
def apart(apart_server: tuple[Served, Control]) -> tuple[Served, Control]:
    return anew(apart_server)


@pytest.fixture
def by_default(by_default_server: tuple[Served, Control]) -> tuple[Served, Control]:
    return anew(by_default_server)


@pytest.fixture
def fronts(fronts_server: tuple[Served, Control]) -> Client:
    return Client(*anew(fronts_server))


@pytest.fixture
def agent(llm: LLM, scheduler: Any, control: Control) -> Iterator[Any]:
    """Yield the agent, with a neutral policy in force, no request running, and nothing left of earlier tests."""
    if scheduler._guard.faults or scheduler._guard.fault or scheduler._agent.facts.later_turns.note:
        # Faults would count towards those of this test, and the engine would keep blocks from experience.
        rebuild(scheduler)
    # A failed test may have left requests and a freeze behind.
    if left := list(scheduler.requests):
        llm.llm_engine.abort_request(left, internal=True)
        # An engine core in its own process takes one more step to clear aborted requests; this engine core steps only
        # on call.
        llm.llm_engine.step()
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    if control.engine().HasField("freeze"):
        control.thaw()
        confirmed(control, False)
    control.apply(NEUTRAL)
    agent = scheduler._agent
    if agent.frozen or not agent.link.outbox.follows or agent.tracker.markers != agent.link.lease.held[1]:
        # An idle engine takes other markers over, and the end of a freeze, with its next request.
        from vllm import SamplingParams

        chat(llm, cases()[:1], SamplingParams(max_tokens=1))
        control.settled()
    yield agent
    assert not scheduler._guard.fault


@pytest.fixture(autouse=True)
def _begins_anew(request: pytest.FixtureRequest, _connects_soon: None) -> None:
    """Let each test on the shared engine begin as the fixture `agent` says, also if it asks for less."""
    if "control" in request.fixturenames:
        request.getfixturevalue("agent")


@pytest.fixture
def probe_requests(agent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each EAT probe a request of its own, although this engine can compute probes as rows of their requests."""
    assert not agent.facts.no_probe_rows
    monkeypatch.setattr(agent, "facts", replace(agent.facts, no_probe_rows="switched off by the test"))
