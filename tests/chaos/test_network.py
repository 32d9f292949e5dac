"""Tests of the emulated network: on a model of packets, and with the kernel's own UDP and TCP."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from tests.chaos.network import CONTROL_ADDRESS, CUT, FINE, Conditions, Network
from tests.chaos.wire import QUEUE_S, Way
from tests.processes import Process, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKETS = 2000
# Seconds to wait for datagrams that all come back, however busy the machine is, and seconds after which a missing
# datagram is lost.
PATIENT_S, LOST_S = 60.0, 3.0


def arrivals(conditions: Conditions, seed: int = 0, every_s: float = 0.001, size: int = 2) -> list[tuple[float, int]]:
    """Return the number and the arrival time of each of PACKETS packets, sent one after the other."""
    way = Way(random.Random(seed), conditions)
    found, numbers = [], iter(range(PACKETS))
    sent_s, number = 0.0, next(numbers)
    while True:
        due_s = way.next_arrival_s()
        if number is not None and (due_s is None or sent_s <= due_s):
            way.send(sent_s, number.to_bytes(size, "little"))
            sent_s, number = sent_s + every_s, next(numbers, None)  # type: ignore[assignment]
        elif due_s is not None:
            found += [(due_s, int.from_bytes(packet, "little")) for packet in way.arrived(due_s)]
        else:
            return found


def test_a_fine_network_changes_nothing() -> None:
    assert [n for _, n in arrivals(FINE)] == list(range(PACKETS))


def test_a_seed_gives_the_same_again() -> None:
    bad = Conditions(delay_ms=5, jitter_ms=20, loss=0.1, reorder=0.1, duplicate=0.1)
    assert arrivals(bad, seed=1) == arrivals(bad, seed=1) != arrivals(bad, seed=2)


def test_delay_and_jitter_keep_the_order() -> None:
    found = arrivals(Conditions(delay_ms=5, jitter_ms=20))
    assert [n for _, n in found] == list(range(PACKETS))
    waits_s = [at - n * 0.001 for at, n in found]
    assert 0.005 <= min(waits_s) < 0.012
    assert 0.022 < max(waits_s) <= 0.0251


def test_loss() -> None:
    assert 0.07 < 1 - len(arrivals(Conditions(loss=0.1))) / PACKETS < 0.13


def test_reordering_loses_nothing() -> None:
    order = [n for _, n in arrivals(Conditions(delay_ms=5, reorder=0.1))]
    assert sorted(order) == list(range(PACKETS))
    assert sum(a > b for a, b in pairwise(order)) > 100


def test_duplicates() -> None:
    found = [n for _, n in arrivals(Conditions(duplicate=0.1))]
    assert 0.07 < len(found) / PACKETS - 1 < 0.13
    assert sorted(set(found)) == list(range(PACKETS))


def test_a_line_takes_its_time_and_drops_what_waits_too_long() -> None:
    """1000 bytes are sent each millisecond onto a line with a tenth of that rate."""
    found = arrivals(Conditions(bytes_per_s=100_000), size=1000)
    times = [at for at, _ in found]
    assert all(later - earlier >= 0.00999 for earlier, later in pairwise(times))
    assert max(at - n * 0.001 for at, n in found) <= QUEUE_S + 0.011
    assert 0.1 < len(found) / PACKETS < 0.15


def test_a_cut_takes_what_is_under_way() -> None:
    way = Way(random.Random(0), Conditions(delay_ms=5))
    way.send(0.0, b"under way")
    way.change(CUT, 0.001)
    way.send(0.002, b"sent into it")
    way.change(FINE, 0.003)
    way.send(0.004, b"after it")
    assert way.arrived(1.0) == [b"after it"]
    assert way.counts["cut"] == 2


# ------------------------------------------------------------------------------------------------- the kernel's stacks

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


def without_the_lost(network: Network, count: int) -> int:
    """Return how many of so many datagrams come back, once these and the lost ones are all of them.

    On a busy machine a datagram may take longer than LOST_S, and then the next attempt counts.
    """
    while True:
        before = network.counts()["up"].get("lost", 0)
        found = len(beside_the_engine(network, DATAGRAMS, count, LOST_S))
        if found + network.counts()["up"].get("lost", 0) - before == count:
            return found


@pytest.mark.usefixtures("echo")
def test_datagrams(network: Network) -> None:
    network.mend()
    fine = beside_the_engine(network, DATAGRAMS, 100, PATIENT_S)
    assert [n for n, _ in fine] == list(range(100))
    network.set(up=Conditions(delay_ms=60), down=Conditions(delay_ms=40))
    assert min(s for _, s in beside_the_engine(network, DATAGRAMS, 20, PATIENT_S)) >= 0.1
    network.set(up=Conditions(loss=0.3), down=FINE)
    assert 100 < without_the_lost(network, 200) < 180
    network.set(up=FINE, down=Conditions(reorder=0.3))
    order = [n for n, _ in beside_the_engine(network, DATAGRAMS, 100, PATIENT_S)]
    assert order != sorted(order) == list(range(100))


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
