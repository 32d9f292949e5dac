"""The emulated network with the kernel's own UDP and TCP: a partition is one, and TCP repairs the rest."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.chaos.network import CONTROL_ADDRESS, CUT, Conditions, Network
from tests.processes import Process, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

# Seconds to wait for datagrams that all come back, however busy the machine is, and seconds after which a missing
# datagram is lost.
PATIENT_S, LOST_S = 60.0, 3.0


ECHO = """
import socket, sys, threading
udp = socket.socket(type=socket.SOCK_DGRAM)
udp.bind((sys.argv[1], 9))
tcp = socket.create_server((sys.argv[1], 9))
def copies():
    while True:
        connection, _ = tcp.accept()
        while data := connection.recv(65536):
            connection.sendall(data)
        connection.close()
threading.Thread(target=copies, daemon=True).start()
print("ready", flush=True)
while True:
    udp.sendto(*udp.recvfrom(2048))
"""
# Program that sends numbered datagrams and prints [number, seconds to its return] in the order of return, until all are
# back or none came for the given time.
DATAGRAMS = """
import json, socket, sys, time
udp = socket.socket(type=socket.SOCK_DGRAM)
udp.connect((sys.argv[1], 9))
udp.settimeout(float(sys.argv[3]))
sent, found = {}, []
for number in range(int(sys.argv[2])):
    sent[number] = time.monotonic()
    udp.send(number.to_bytes(4, "little"))
try:
    while len(found) < len(sent):
        number = int.from_bytes(udp.recv(2048), "little")
        found.append((number, time.monotonic() - sent[number]))
except TimeoutError:
    pass
print(json.dumps(found))
"""
# Program that sends a given number of bytes through a connection and prints whether the same bytes came back.
STREAM = """
import os, socket, sys, threading
data = os.urandom(int(sys.argv[2]))
with socket.create_connection((sys.argv[1], 9), timeout=60) as tcp:
    threading.Thread(target=tcp.sendall, args=(data,), daemon=True).start()
    back = b""
    while len(back) < len(data) and (more := tcp.recv(65536)):
        back += more
print("true" if back == data else "false")
"""


@pytest.fixture(scope="module")
def echo(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    log = tmp_path_factory.mktemp("echo") / "echo.log"
    echo = network.run("control", [sys.executable, "-c", ECHO, CONTROL_ADDRESS], log)
    wait_for(lambda: "ready" in echo.output(), 30, "the echo to be ready")
    yield echo
    echo.stop()


def beside_the_engine(network: Network, program: str, *args: Any) -> Any:
    command = [*network.within("engine"), sys.executable, "-c", program, CONTROL_ADDRESS, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    return json.loads(done.stdout)


@pytest.mark.usefixtures("echo")
@pytest.mark.parametrize("way", ["up", "down"])
def test_a_partition_one_way(network: Network, way: str) -> None:
    network.mend()
    network.set(**{way: CUT})
    before = network.counts()["up"]["arrived"]
    assert beside_the_engine(network, DATAGRAMS, 20, LOST_S) == []
    arrived = 0 if way == "up" else 20
    wait_for(lambda: network.counts()["up"]["arrived"] - before == arrived, 20, f"{arrived} datagrams to arrive")
    network.mend()
    assert len(beside_the_engine(network, DATAGRAMS, 20, PATIENT_S)) == 20


@pytest.mark.usefixtures("echo")
def test_tcp_gets_through_all_of_it(network: Network) -> None:
    """The kernel's own TCP repairs all losses of the network."""
    bad = Conditions(delay_ms=2, jitter_ms=3, loss=0.02, reorder=0.05, duplicate=0.02)
    network.set(bad, bad)
    before = network.counts()
    assert beside_the_engine(network, STREAM, 300_000) is True
    after = network.counts()
    for what in ("lost", "held_back", "duplicated"):
        assert after["up"].get(what, 0) > before["up"].get(what, 0), what
    network.mend()
