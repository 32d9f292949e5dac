"""Several addresses of a control plane, some of which lead nowhere: the agent's real link on the emulated network."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.chaos.network import Network, NoNamespacesError
from tests.chaos.scene import TARGET
from tests.needed import NETWORK
from tests.processes import wait_for

# Address without a host on this network; packets to it get no reply, not even an error.
NOWHERE = "10.99.0.9"
NAME = "control.test"
# Program that prints the seconds until the agent was connected.
CONNECT = """
import asyncio, json, sys, time
from meridian_agent.link import control_stream as link
from tests.fakes.linked import LinkedEngine, until
link.PATIENCE_S = (1.0, 60.0)
async def main():
    began_s = time.monotonic()
    with LinkedEngine(sys.argv[1:]) as engine:
        await until(lambda: engine.link.lease.connected, 50)
    print(json.dumps(time.monotonic() - began_s))
asyncio.run(main())
"""


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    try:
        network = Network(seed=3)
    except NoNamespacesError as error:
        pytest.skip(f"{error}; {NETWORK.reason}")
    yield network
    network.stop()


@pytest.fixture(scope="module")
def control(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    log = tmp_path_factory.mktemp("far") / "silent.log"
    command = [sys.executable, "-m", "tests.chaos.foreign", "stray", TARGET]
    process = network.run("control", command, log)
    wait_for(lambda: "ready" in process.output(), 30, "a server")
    yield
    process.stop()


def connect(network: Network, *targets: str, before: Sequence[str] = ()) -> float:
    command = [*network.within("engine"), *before, sys.executable, "-c", CONNECT, *targets]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    return float(json.loads(done.stdout))


@pytest.mark.usefixtures("control")
def test_the_next_of_several_addresses(network: Network) -> None:
    """The agent tries the next address after its own patience for the first one, not after gRPC's twenty seconds."""
    assert 1.0 <= connect(network, f"{NOWHERE}:7000", TARGET) < 20.0


@pytest.mark.usefixtures("control")
def test_a_name_with_several_addresses(network: Network, tmp_path: Path) -> None:
    """gRPC tries the addresses of a name side by side; the agent's patience is for all of them together."""
    hosts = tmp_path / "hosts"
    lines = [f"{address} {NAME}" for address in (NOWHERE, TARGET.partition(":")[0], "10.99.0.8")]
    hosts.write_text("127.0.0.1 localhost\n" + "\n".join(lines) + "\n")
    mount = ["unshare", "--mount", "sh", "-c", f'mount --bind {hosts} /etc/hosts && exec "$@"', "sh"]
    connect(network, f"{NAME}:7000", before=mount)
