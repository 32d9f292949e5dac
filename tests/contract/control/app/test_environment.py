"""The environment variables of `meridian-control` and `meridianctl`: empty is unset, and a bad value is named."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

import meridian_control
from tests.contract.proxies import proxy
from tests.processes import MERIDIANCTL, Control, Process, free_port, run, wait_for

PACKAGE = Path(meridian_control.__file__).parent
# Variables that the agent reads, which the control plane's code names in its texts.
SERVER = ("MERIDIAN_STORE", "MERIDIAN_LOG_FORMAT")
CLIENT = (
    "MERIDIAN_SERVER",
    "MERIDIAN_CONTEXT",
    "MERIDIAN_CONTEXTS",
    "MERIDIAN_PROXY",
    "MERIDIAN_TLS_CA",
    "MERIDIAN_TLS_CERT",
    "MERIDIAN_TLS_KEY",
    "MERIDIAN_TOKEN_FILE",
    "MERIDIAN_AUTHOR",
)
# What the log says once the server serves.
SERVING = "listening on "
OTLP = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT")


def unset() -> dict[str, str]:
    """Return this process's environment without the variables of Meridian and of OpenTelemetry."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("MERIDIAN_", "OTEL_"))}


def ctl(env: Mapping[str, str], *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    path = {"PYTHONPATH": os.pathsep.join(sys.path), "NO_COLOR": "1"}
    return run([*MERIDIANCTL, *arguments], {**env, **path}, cwd)


@contextmanager
def server(folder: Path, env: Mapping[str, str], within: tuple[str, ...] = ()) -> Iterator[tuple[str, Process]]:
    """Run `meridian-control` in `folder`, with its defaults for everything but its addresses."""
    target = f"127.0.0.1:{free_port()}"
    program = [*within, "env", "-i", *(f"{name}={value}" for name, value in env.items())]
    code = f"import os, sys; os.chdir({str(folder)!r}); from meridian_control.app.main import main; sys.exit(main())"
    listen = ["--listen", target, "--metrics-listen", "", "--page-listen", ""]
    before = (folder / "log").read_text().count(SERVING) if (folder / "log").exists() else 0
    process = Process([*program, sys.executable, "-c", code, *listen], folder / "log")

    def serving() -> bool:
        assert process.popen.poll() is None, process.output()
        return process.output().count(SERVING) > before

    try:
        wait_for(serving, 30, "the server to serve")
        yield target, process
    finally:
        process.stop()


def paths() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(sys.path), "PATH": os.environ["PATH"]}


def test_empty_variables_are_unset(tmp_path: Path) -> None:
    """With every variable empty, the store is the default file and keeps a revision over a restart, and the client
    finds the server of the current context."""
    empty = dict.fromkeys((*SERVER, *CLIENT, *OTLP, "XDG_CONFIG_HOME"), "")
    home = {"HOME": str(tmp_path), "USER": "ann"}
    policy = tmp_path / "policy.toml"
    policy.write_text("fallback.lease_ms = 500\n")
    contexts = tmp_path / ".config" / "meridian" / "contexts.toml"
    contexts.parent.mkdir(parents=True)
    with server(tmp_path, paths() | empty | home) as (target, _):
        contexts.write_text(f'current = "here"\n[contexts.here]\nserver = "{target}"\n')
        applied = ctl(unset() | empty | home, "policy", "apply", "-f", str(policy))
        assert applied.stdout.startswith("revision 2 "), applied.stderr
    with server(tmp_path, paths() | empty | home) as (target, _):
        contexts.write_text(f'current = "here"\n[contexts.here]\nserver = "{target}"\n')
        history = ctl(unset() | empty | home, "policy", "history")
        assert history.returncode == 0, history.stderr
        assert [line.split()[0] for line in history.stdout.splitlines()] == ["revision", "2", "1"]
        assert " ann " in history.stdout
    assert (tmp_path / "meridian.db").exists()


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("MERIDIAN_SERVER", "control:0", "MERIDIAN_SERVER must be an address host:port; got 'control:0'"),
        ("MERIDIAN_PROXY", "https://u:p@w@proxy:3128", "a URL http://host:port; got 'https://***@proxy:3128'"),
        ("MERIDIAN_CONTEXT", "gone", 'has no context "gone"; known contexts: none'),
        (
            "MERIDIAN_TLS_CA",
            "/gone",
            "/gone: cannot be read: No such file or directory; named by --ca, MERIDIAN_TLS",
        ),
        ("MERIDIAN_TOKEN_FILE", "/gone", "a token is only sent over TLS"),
    ],
)
def test_a_value_that_the_client_cannot_use(tmp_path: Path, name: str, value: str, complaint: str) -> None:
    ended = ctl(unset() | {"HOME": str(tmp_path), name: value}, "engines")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert complaint in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("env", "options", "complaint"),
    [
        (
            {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "c:4317"},
            [],
            "meridian-control: OTEL_EXPORTER_OTLP_METRICS_ENDPOINT must be unset, because no metrics are sent: let the "
            "OpenTelemetry collector scrape /metrics (its Prometheus receiver); got 'c:4317'\n",
        ),
        ({"MERIDIAN_LOG_FORMAT": "xml"}, [], "meridian-control: MERIDIAN_LOG_FORMAT must be text or json; got 'xml'\n"),
        ({}, ["--store", " "], "meridian-control: --store must name a SQLite file or a PostgreSQL database; got ''\n"),
        ({}, ["--policy", ""], "argument --policy: must not be empty\n"),
    ],
)
def test_a_value_that_the_server_cannot_use(
    tmp_path: Path, env: dict[str, str], options: list[str], complaint: str
) -> None:
    command = [sys.executable, "-m", "meridian_control", "--listen", "127.0.0.1:0", *options]
    ended = run(command, {**unset(), **paths(), **env}, tmp_path)
    assert ended.returncode == 2
    assert ended.stderr.endswith(complaint)
    assert "Traceback" not in ended.stderr


def test_a_proxy_for_other_programs_is_not_used(tmp_path: Path) -> None:
    """The client's calls go straight to the server, unless MERIDIAN_PROXY names a proxy."""
    control = Control(tmp_path)
    try:
        with proxy() as other:
            env = unset() | other.environment | {"MERIDIAN_SERVER": control.target}
            straight = ctl(env, "engines")
            assert (straight.returncode, other.asked) == (0, []), straight.stderr
            through = ctl(env | {"MERIDIAN_PROXY": other.url}, "engines")
            assert through.returncode == 0, through.stderr
            assert [line.split()[0] for line in other.asked] == ["CONNECT"]
    finally:
        control.process.stop()


# ------------------------------------------------------------------------------------------------- no home folder


def nobody() -> list[str]:
    """Return the prefix of a command that runs as a user whom the host does not know, without any variable."""
    prefix = ["unshare", "--user", "--map-user=54321"]
    if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs user namespaces, in which a process can be an unknown user")
    return prefix


def as_nobody(*command: str, **env: str) -> subprocess.CompletedProcess[str]:
    given = [f"{name}={value}" for name, value in {**paths(), **env}.items()]
    whole = [*nobody(), "env", "-i", *given, *command]
    return subprocess.run(whole, capture_output=True, text=True, check=False, timeout=600)


def test_without_a_home_folder(tmp_path: Path) -> None:
    """A container's user is often unknown in it. Both programs work, and a context is refused in one line."""
    with server(tmp_path, paths(), tuple(nobody())) as (target, process):
        listed = as_nobody(*MERIDIANCTL, "--server", target, "engines")
        assert (listed.returncode, listed.stderr) == (0, "")
        named = as_nobody(*MERIDIANCTL, "engines", MERIDIAN_CONTEXT="prod")
        assert (named.returncode, named.stderr.count("\n")) == (2, 1)
        assert "there is no home folder: set MERIDIAN_CONTEXTS" in named.stderr
        process.signal(signal.SIGTERM)
        assert process.popen.wait(120) == 0
        assert "Traceback" not in process.output()
    assert (tmp_path / "meridian.db").exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """The default store is in the working directory, which an unknown user may not be able to write."""
    tmp_path.chmod(0o555)
    code = f"import os, sys; os.chdir({str(tmp_path)!r}); from meridian_control.app.main import main; sys.exit(main())"
    ended = as_nobody(sys.executable, "-c", code, "--listen", "127.0.0.1:0")
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert "meridian-control: policy store: " in ended.stderr


def test_postgres_without_a_home_folder() -> None:
    """The driver looks for a password file in the home folder."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        store = f"postgresql://u:p@127.0.0.1:{closed.getsockname()[1]}/m"
        ended = as_nobody(sys.executable, "-m", "meridian_control", "--listen", "127.0.0.1:0", "--store", store)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert "meridian-control: policy store: " in ended.stderr
