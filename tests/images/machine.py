"""Reads where this machine gets its packages: apt's mirror and pip's settings.

An image that is built here gets its packages from the same places, so the project names no place itself.
"""

from __future__ import annotations

import ast
import configparser
import io
import platform
import re
import subprocess
import sys
from pathlib import Path

# A setting of pip that names a place on this machine: a path or a file URL.
PLACE = re.compile(r"(?<!\S)(file://)?(/\S+)")


def apt_mirror() -> tuple[str, str]:
    """Return the codename of this machine's release, and the mirror from which apt installs its packages.

    Raises LookupError if apt has no such mirror.
    """
    codename = platform.freedesktop_os_release()["VERSION_CODENAME"]
    command = ["apt-get", "indextargets", "--format", "$(CODENAME) $(REPO_URI)", "Created-By: Packages"]
    for line in _output(*command, "Component: main").splitlines():
        found, mirror = line.split(maxsplit=1)
        if found == codename:
            return codename, mirror
    raise LookupError(f"apt has no mirror of {codename}: run apt-get update")


def pip_settings() -> str:
    """Return this machine's settings of pip, the environment's included, as the content of one configuration file."""
    parser = configparser.RawConfigParser()
    for line in _output(sys.executable, "-m", "pip", "config", "list").splitlines():
        name, _, value = line.partition("=")
        section, _, option = name.rpartition(".")
        section = "global" if section == ":env:" else section
        if not parser.has_section(section):
            parser.add_section(section)
        parser.set(section, option, ast.literal_eval(value))
    text = io.StringIO()
    parser.write(text)
    return text.getvalue()


def pip_places(settings: str) -> list[Path]:
    """Return the files and folders of this machine that pip's settings name, and that a build needs at the same place.

    The pages of an index in a folder may link to files beside that folder, so of a file URL the parent is returned.
    """
    places = set()
    for scheme, name in PLACE.findall(settings):
        path = Path(name).parent if scheme else Path(name)
        if path.exists():
            places.add(path)
    return sorted(places)


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
