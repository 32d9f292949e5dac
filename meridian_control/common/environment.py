"""Reads the environment variables of the control plane's programs. An empty variable counts as unset."""
# ruff: noqa: N818 - BadVariable is named after the condition that it reports

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


# What a text leaves out of a value, where a URL has a password.
USER = re.compile(r"^([a-z][a-z\d+.-]*://)?.*@", re.IGNORECASE | re.DOTALL)


class BadVariable(ValueError):
    """A variable whose value cannot be used; the text has the variable's name and the value."""

    def __init__(self, name: str, said: str, wanted: str) -> None:
        shown = USER.sub(r"\1***@", said)
        super().__init__(f"{name} must be {wanted}; got {shown!r}")


def read(name: str) -> str:
    """Return the variable's value without blanks around it; empty if the variable is unset. Raises BadVariable if the
    value is not UTF-8, because neither gRPC nor the store takes such text."""
    said = os.environ.get(name, "").strip()
    if any("\ud800" <= character <= "\udfff" for character in said):
        raise BadVariable(name, said, "UTF-8")
    return said


def config_home() -> Path | None:
    """Return the folder of the user's configuration files, None if the user has no home folder."""
    # A relative path in XDG_CONFIG_HOME is not valid.
    if (said := Path(os.environ.get("XDG_CONFIG_HOME", ""))).is_absolute():
        return said
    home = os.path.expanduser("~")
    return Path(home) / ".config" if os.path.isabs(home) else None


def choice(name: str, otherwise: str, choices: Sequence[str]) -> str:
    """Return the variable's value, one of `choices`, or `otherwise` if it is unset. Raises BadVariable."""
    said = read(name) or otherwise
    if said not in choices:
        raise BadVariable(name, said, " or ".join(choices))
    return said
