"""The network emulator's process: two network namespaces with a TUN device each, and the packets between them.

`network.Network` starts `python -m tests.chaos.emulator FOLDER SEED`. The process makes a user namespace, so that it
needs no root, and in it the engine's network namespace and then the control plane's, in which it stays. Everything is
on one event loop. FOLDER/control.sock takes commands, a line of JSON each: `conditions`, `counts`, `relay`.

A relay carries connections from a Unix socket, which namespaces do not separate, to a port in the control plane's
namespace. A program outside the namespaces uses it to reach the port past the emulated network.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import json
import os
import random
import socket
import struct
import sys
from pathlib import Path
from typing import Any

from tests.chaos.wire import Conditions, Way

ENGINE_ADDRESS, CONTROL_ADDRESS = "10.99.0.1", "10.99.0.2"
NETMASK = "255.255.255.0"
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
SIOCSIFADDR, SIOCSIFNETMASK, SIOCGIFFLAGS, SIOCSIFFLAGS = 0x8916, 0x891C, 0x8913, 0x8914
IFF_UP = 0x1
MAX_PACKET = 65536
# Most packets read from a device before the other device has its turn.
BURST = 64


def unshare(flags: int) -> None:
    """Leave the given namespaces for new ones. Raises OSError if the kernel or a sandbox forbids it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def make_user_namespace() -> None:
    """Make a user namespace in which this user is root, with a network namespace of its own."""
    uid, gid = os.getuid(), os.getgid()
    unshare(CLONE_NEWUSER | CLONE_NEWNET)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    Path("/proc/self/gid_map").write_text(f"0 {gid} 1")


def up(name: str, address: str, netmask: str) -> None:
    """Give a device its address and switch it on."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        for request, value in ((SIOCSIFADDR, address), (SIOCSIFNETMASK, netmask)):
            inet = struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(value))
            fcntl.ioctl(s, request, struct.pack("16s16s", name.encode(), inet))
        flags = struct.unpack("16sh", fcntl.ioctl(s, SIOCGIFFLAGS, struct.pack("16sh", name.encode(), 0)))[1]
        fcntl.ioctl(s, SIOCSIFFLAGS, struct.pack("16sh", name.encode(), flags | IFF_UP))


def tun(address: str) -> int:
    """Make a TUN device in this process's network namespace; return the file descriptor of its packets."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", b"tun0", IFF_TUN | IFF_NO_PI))
    up("tun0", address, NETMASK)
    up("lo", "127.0.0.1", "255.0.0.0")
    return device


class Emulator:
    """Carries packets in both directions between the devices' file descriptors.

    `up` is the direction from the engine to the control plane, `down` the direction back.
    """

    def __init__(self, engine: int, control: int, seed: int) -> None:
        self.ways = {name: Way(random.Random(f"{seed} {name}")) for name in ("up", "down")}
        self._into = {"up": control, "down": engine}
        self._wakes: dict[str, asyncio.TimerHandle | None] = {"up": None, "down": None}
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(engine, self._read, engine, "up")
        self._loop.add_reader(control, self._read, control, "down")

    def _read(self, device: int, name: str) -> None:
        way = self.ways[name]
        for _ in range(BURST):
            try:
                packet = os.read(device, MAX_PACKET)
            except BlockingIOError:
                break
            # Drop packets that are not IPv4, because the kernel looks for IPv6 routers on every new device.
            if packet[0] >> 4 == 4:
                way.send(self._loop.time(), packet)
        self._deliver(name)

    def _deliver(self, name: str) -> None:
        way, wake = self.ways[name], self._wakes[name]
        for packet in way.arrived(self._loop.time()):
            # A device with a full queue loses the packet, as any network device does.
            with contextlib.suppress(BlockingIOError):
                os.write(self._into[name], packet)
        if wake is not None:
            wake.cancel()
        at_s = way.next_arrival_s()
        self._wakes[name] = None if at_s is None else self._loop.call_at(at_s, self._deliver, name)

    async def answer(self, command: dict[str, Any]) -> Any:
        """Carry out one command."""
        if command["do"] == "relay":
            await asyncio.start_unix_server(lambda r, w: relay(r, w, command["port"]), command["path"])
        elif command["do"] == "conditions":
            for name, conditions in command["of"].items():
                self.ways[name].change(Conditions(**conditions), self._loop.time())
                self._deliver(name)
        return {name: dict(way.counts) for name, way in self.ways.items()}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the commands of one connection, in order."""
        while line := await reader.readline():
            writer.write(json.dumps(await self.answer(json.loads(line))).encode() + b"\n")
        writer.close()


async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
    """Carry one connection to a port in this namespace until either end closes it."""
    try:
        other_reader, other_writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        writer.close()
        return
    await asyncio.gather(_pipe(reader, other_writer), _pipe(other_reader, writer))


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(MAX_PACKET):
            writer.write(data)
            await writer.drain()
    writer.close()


async def run(folder: Path, seed: int) -> None:
    make_user_namespace()
    engine_namespace = os.open("/proc/self/ns/net", os.O_RDONLY)
    engine = tun(ENGINE_ADDRESS)
    unshare(CLONE_NEWNET)
    control_namespace = os.open("/proc/self/ns/net", os.O_RDONLY)
    control = tun(CONTROL_ADDRESS)
    emulator = Emulator(engine, control, seed)
    server = await asyncio.start_unix_server(emulator.serve, folder / "control.sock")
    namespaces = {"engine": engine_namespace, "control": control_namespace}
    (folder / "namespaces.new").write_text(json.dumps(namespaces))
    (folder / "namespaces.new").replace(folder / "namespaces.json")
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(run(Path(sys.argv[1]), int(sys.argv[2])))
