"""Tests of a release: the wheel is reproducible, its agent is found in a folder of PYTHONPATH, and the lock is
complete.

The Dockerfiles pass hadolint.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from deploy.generate import HERE

ROOT = HERE.parent


# A time in the past; dates in a wheel have even seconds.
EPOCH = 1_600_000_000


def built(folder: Path, project: Path = ROOT) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    env = {**os.environ, "SOURCE_DATE_EPOCH": str(EPOCH)}
    subprocess.run(command, cwd=project, env=env, check=True, stdout=subprocess.DEVNULL)
    (wheel,) = folder.glob("*.whl")
    return wheel


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("first"))


def test_the_wheel_is_reproducible(wheel: Path, tmp_path: Path) -> None:
    assert digest(built(tmp_path)) == digest(wheel)
    dates = {file.date_time for file in zipfile.ZipFile(wheel).infolist()}
    assert dates == {time.gmtime(EPOCH)[:6]}, "its dates come from SOURCE_DATE_EPOCH"


def test_every_file_names_the_same_version() -> None:
    """The package, its modules, the images in manifests and documents, and the newest section of the changelog."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    files = [ROOT / "meridian_agent/__init__.py", ROOT / "meridian_control/__init__.py", ROOT / "CHANGELOG.md"]
    files += [HERE / "relay/pyproject.toml", HERE / "relay/meridian_relay/__init__.py"]
    files += [path for kind in ("*.md", "*.yaml", "*.Dockerfile") for path in HERE.rglob(kind)]
    patterns = (
        r'^__version__ = "(.+)"',
        r"meridian-[a-z-]+:(\d+\.[\d.]*\d)",
        r"newTag: (.+)",
        r"meridian_llm-([\d.]+)-",
        r"^## (\d\S+)",
        r'^version = "(.+)"',
    )
    pattern = "|".join(patterns)
    found = {path: re.findall(pattern, path.read_text(), re.MULTILINE) for path in files}
    named = {path: {"".join(match) for match in matches} for path, matches in found.items() if matches}
    named[ROOT / "CHANGELOG.md"] = {"".join(found[ROOT / "CHANGELOG.md"][0])}
    assert {path: numbers for path, numbers in named.items() if numbers != {version}} == {}
    assert len(named) > 5


def test_the_wheel_holds_the_packages_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    packages = {"meridian", "meridian_control", "meridian_agent", "meridian_kernels"}
    assert {top for top in tops if not top.endswith(".dist-info")} == packages
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_relays_wheel_holds_the_relay_alone(tmp_path: Path) -> None:
    names = zipfile.ZipFile(built(tmp_path, HERE / "relay")).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"meridian_relay"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_agent_is_found_in_a_folder_of_the_python_path(wheel: Path, tmp_path: Path) -> None:
    """The init container installs the wheel in this way: unpacked, entry point included, without any other
    registration."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "from importlib.metadata import entry_points\n"
        "plugins = entry_points(group='vllm.general_plugins')\n"
        f"found = [e for e in plugins if str(e.dist.locate_file('')) == {str(tmp_path)!r}]\n"
        "register = found[0].load()\n"
        "import sys; print(len(found), register.__module__, sys.modules['meridian_agent'].__file__)\n"
        "register(); print(sorted(m for m in sys.modules if m.startswith(('meridian', 'grpc', 'vllm'))))"
    )
    env = {k: v for k, v in os.environ.items() if k != "MERIDIAN_CONTROL"} | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, env=env, check=True, capture_output=True, text=True
    )
    found, imported = done.stdout.splitlines()
    assert found == f"1 meridian_agent.plugin {tmp_path}/meridian_agent/__init__.py"
    assert imported == "['meridian_agent', 'meridian_agent.plugin']", "unset, it imports nothing"


def test_the_lock_has_every_requirement_pinned_and_hashed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        Requirement(r)
        for r in [
            *project["dependencies"],
            *project["optional-dependencies"]["control"],
            *project["optional-dependencies"]["traces"],
            *tomllib.loads((HERE / "relay" / "pyproject.toml").read_text())["project"]["dependencies"],
        ]
    ]
    entries = re.split(r"\n(?=\S)", (HERE / "requirements.lock").read_text())
    locked = {}
    for entry in entries:
        if found := re.match(r"([\w.-]+)==([\w.]+)", entry):
            assert "--hash=sha256:" in entry, entry
            locked[found[1].lower()] = found[2]
    for requirement in wanted:
        assert requirement.specifier.contains(locked[requirement.name.lower()]), requirement
    assert "://" not in "\n".join(line for entry in entries for line in entry.splitlines() if not line.startswith("#"))


# hadolint is beside the interpreter, whether or not that folder is in PATH.
HADOLINT = str(Path(sys.executable).parent / "hadolint")


@pytest.mark.parametrize("path", sorted((HERE / "images").glob("*.Dockerfile")), ids=lambda p: p.stem)
def test_a_dockerfile_in_hadolint(path: Path) -> None:
    done = subprocess.run([HADOLINT, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", sorted((HERE / "images").glob("*.Dockerfile")), ids=lambda p: p.stem)
def test_a_dockerfile_names_one_version_and_lets_it_be_pinned(path: Path) -> None:
    """Base images are arguments, so that digests can be given; vLLM's image is the one on which the agent's tests
    run."""
    text = path.read_text()
    named = re.findall(r"^ARG (\w+)=(\S+)$", text, re.MULTILINE)
    arguments = dict(named)
    assert len(named) == len(arguments)
    for used in re.findall(r"^FROM (\S+)", text, re.MULTILINE):
        assert re.fullmatch(r"[\w./-]+:v?\d[\w.-]*", arguments[used.strip("${}")])
    if path.stem == "agent":
        assert arguments["BASE"] == "vllm/vllm-openai:v0.32.0"
    # A package that pip installs by name has its version from an argument, too, and from nowhere else.
    for package in ("CUPY",) if "CUPY" in arguments else ():
        version = arguments[f"{package}_VERSION"]
        assert re.fullmatch(r"\d+(\.\d+)+", version)
        assert f'"${{{package}}}==${{{package}_VERSION}}"' in text
        assert text.count(version) == text.count(arguments[package]) == 1
