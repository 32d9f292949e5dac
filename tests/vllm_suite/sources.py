"""Fetch vLLM's source distributions, which have its tests, and make an environment to run them in.

All files are under build/, which git ignores. vLLM's Python runs from the unpacked sources, on the torch of the present
environment; vLLM's compiled kernels, which no scheduler needs, are missing.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

from tests.processes import ROOT

BUILD = ROOT / "build" / "vllm-tests"
# Folders with vLLM's tests of its scheduler and its connectors, and the names by which a test file shows that it makes
# schedulers. Other files test caches, layouts and transfers without a scheduler.
FOLDERS = ("tests/v1/core", "tests/v1/kv_connector/unit")
MAKES_SCHEDULERS = re.compile(
    r"\bcreate_(\w+_)?scheduler|\b(Async)?Scheduler\(|import (Async)?Scheduler\b|\brequest_runner\b"
)
# Packages that pip needs to accept a source distribution, and packages that vLLM's tests import.
PACKAGES = (
    "setuptools>=77.0.3,<81",
    "setuptools-scm>=8",
    "setuptools-rust>=1.9",
    "msgpack>=1",
    "ray>=2.48",
    "tblib>=3",
)


def python() -> Path:
    """Return the interpreter of an environment on top of this one, which is made if it does not exist."""
    folder = BUILD / "venv"
    done = folder / "ready"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        own = next(folder.glob("lib/python*/site-packages"))
        (own / "below.pth").write_text(sysconfig.get_path("purelib") + "\n")
        # The packages of the environment below conflict with these; none of them is used while a package is built.
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-warn-conflicts"]
        subprocess.run([*pip, *PACKAGES], check=True)
        done.touch()
    return folder / "bin" / "python"


def tree(version: str) -> Path:
    """Return the unpacked source distribution of a vLLM, which pip fetches if it does not exist."""
    folder = BUILD / version / f"vllm-{version}"
    done = BUILD / version / "ready"
    if not done.exists():
        with tarfile.open(_archive(version)) as archive:
            archive.extractall(BUILD / version, filter="data")
        _say_cpu(folder, version)
        done.touch()
    return folder


def with_schedulers(folder: Path) -> tuple[list[str], int]:
    """Return the test files of a tree that make schedulers, as paths below it, and the number of files that make
    none."""
    files = sorted(file for below in FOLDERS for file in (folder / below).rglob("test_*.py"))
    chosen = [file for file in files if MAKES_SCHEDULERS.search(file.read_text())]
    return [str(file.relative_to(folder)) for file in chosen], len(files) - len(chosen)


def _archive(version: str) -> Path:
    """Let pip download the archive.

    pip keeps an archive only after building its metadata, and vLLM's build reads a target device and a version for
    that, which are set to no device and to the requested version.
    """
    env = {"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": version}
    fetch = ["pip", "download", "--quiet", "--no-deps", "--no-binary", "vllm", "--no-build-isolation"]
    subprocess.run(
        [python(), "-m", *fetch, "--dest", BUILD / version, f"vllm=={version}"], check=True, env={**os.environ, **env}
    )
    return BUILD / version / f"vllm-{version}.tar.gz"


def _say_cpu(folder: Path, version: str) -> None:
    """Give vLLM the version of a CPU build, by which vLLM recognises one."""
    metadata = folder / "vllm.egg-info" / "PKG-INFO"
    text = metadata.read_text()
    metadata.write_text(re.sub(r"^Version: .*$", f"Version: {version}+cpu", text, count=1, flags=re.MULTILINE))
