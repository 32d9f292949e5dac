"""Renders kustomizations with kubectl or kustomize."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import yaml

from tests.needed import KUSTOMIZE

if TYPE_CHECKING:
    from pathlib import Path

    Object = dict[str, Any]

RENDER = (["kubectl", "kustomize"], ["kustomize", "build"])


def objects(text: str) -> list[Object]:
    return [document for document in yaml.safe_load_all(text) if document]


def rendered(folder: Path) -> list[Object]:
    """Return the objects of a kustomization; without kubectl and kustomize the calling test is skipped."""
    KUSTOMIZE.require()
    command = next(command for command in RENDER if shutil.which(command[0]))
    done = subprocess.run([*command, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return objects(done.stdout)


def only(kind: str, things: list[Object]) -> Object:
    (found,) = [thing for thing in things if thing["kind"] == kind]
    return found
