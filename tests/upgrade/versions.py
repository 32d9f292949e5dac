"""Builds the wheels of previous versions and of this one, installs each, and starts their programs.

Each version has an environment of its own, which sees vLLM and the other packages of the environment that runs the
tests. The wheel comes first on the path, and Python's safe path keeps the checkout off it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx

from tests.bench.cost_control import tree_of
from tests.processes import ENGINE_ENV, MODEL, ROOT, Control, Process, free_port, wait_for

# The commits of the previous versions, which have no tags.
PREVIOUS = {"0.1.0": "8206ef5", "0.2.0": "e50d7e5"}
OPTIONS = ["--served-model-name", "maze", "--reasoning-parser", "qwen3", "--enforce-eager", "--dtype", "float32"]
OPTIONS += ["--block-size", "32", "--max-model-len", "1024", "--max-num-seqs", "8", "--num-gpu-blocks-override", "64"]
SAFE = {"PYTHONSAFEPATH": "1", "PYTHONPATH": ""}


@dataclass(frozen=True)
class Version:
    """A version that is installed: the tree it was built from, its number, and the Python of its environment."""

    tree: Path
    number: str
    python: Path

    def meridianctl(self, target: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run this version's meridianctl against a control plane."""
        command = [str(self.python.with_name("meridianctl")), "--server", target, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=ENGINE_ENV | SAFE)


def previous(number: str, folder: Path) -> Version | str:
    """Install a previous version; return why that is impossible if the clone lacks its commit."""
    tree = folder / "tree"
    return tree_of(PREVIOUS[number], tree) or _installed(tree, folder)


def current(folder: Path) -> Version:
    """Install the wheel of this checkout."""
    return _installed(ROOT, folder)


def _installed(tree: Path, folder: Path) -> Version:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "dist")]
    subprocess.run(command, cwd=tree, check=True, capture_output=True)
    (wheel,) = (folder / "dist").glob("*.whl")
    venv.create(folder / "venv", symlinks=True)
    python = folder / "venv" / "bin" / "python"
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "venv")}))
    # A line that is a folder joins the path as it is, without the editable install that this folder also has.
    (packages / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--quiet", "--disable-pip-version-check"]
    command = [*pip, "install", "--no-deps", "--ignore-installed", str(wheel)]
    subprocess.run(command, check=True, capture_output=True)
    look = "import meridian_agent, meridian_control as c; print(c.__file__); print(c.__version__)"
    found = subprocess.run([str(python), "-c", look], check=True, capture_output=True, text=True, env=SAFE, cwd="/")
    where, number = found.stdout.split()
    assert Path(where).is_relative_to(packages), where
    return Version(tree, number, python)


class Plane(Control):
    """The control plane of a version, as a process."""

    # The previous versions do not know the control group.
    defaults: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, version: Version, folder: Path, port: int, store: str) -> None:
        self._python = version.python
        super().__init__(folder, port, ["--store", store])

    def start(self) -> None:
        command = [str(self._python), "-m", self.module, "--listen", self.target, *self.options]
        command += ["--metrics-listen", "", "--page-listen", ""]
        self.process = Process(command, self.folder / f"control-{self.port}.log", SAFE)
        wait_for(self._serving, 30, "the control plane to serve")


class Engine:
    """A vLLM server with the agent of a version, and a client of it.

    targets: the addresses of its control planes. pool: the value of its label `pool`.
    """

    def __init__(self, version: Version, folder: Path, name: str, pool: str, targets: Sequence[str]) -> None:
        self.name, self.port = name, free_port()
        own = {"MERIDIAN_CONTROL": ",".join(targets), "MERIDIAN_ENGINE_ID": name, "MERIDIAN_LABELS": f"pool={pool}"}
        own |= {"MERIDIAN_STATE_DIR": str(folder / f"state-{name}"), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        command = [str(version.python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL), *OPTIONS]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        self.process = Process(command, folder / f"{name}.log", {**ENGINE_ENV, **SAFE, **own})

    def serving(self) -> bool:
        assert self.process.popen.poll() is None, self.process.output()[-3000:]
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/health", timeout=10).is_success
        except httpx.HTTPError:
            return False

    def think(self, prompt: str) -> int:
        """Send a chat request and return the number of its thinking tokens. Raises httpx.HTTPError."""
        body = {"model": "maze", "messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": 300}
        answer = httpx.post(f"http://127.0.0.1:{self.port}/v1/chat/completions", json=body, timeout=600)
        message = json.loads(answer.raise_for_status().text)["choices"][0]["message"]
        return len((message.get("reasoning") or "").split())
