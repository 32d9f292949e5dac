"""Reads the environment variables of the agent.

An empty variable counts as unset. A value that cannot be used never hurts the engine: the log gets one line with the
variable's name and value, and the caller goes on without it.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

logger = logging.getLogger("vllm.meridian")

TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
# Largest number of characters of a value that the log shows; and what it leaves out, where a URL has a password.
MAX_SHOWN, USER = 200, re.compile(r"^([a-z][a-z\d+.-]*://)?.*@", re.IGNORECASE | re.DOTALL)


def read(name: str) -> str:
    """Return the variable's value without blanks around it; empty if the variable is unset."""
    return os.environ.get(name, "").strip()


def complain(name: str, said: str, why: str) -> None:
    """Log that a value cannot be used, and what happens instead."""
    logger.error("meridian: %s=%s: %s", name, ascii(USER.sub(r"\1***@", said)[:MAX_SHOWN]), why)


def is_true(name: str, otherwise: bool, meaning: str) -> bool:
    """Return the variable's value as a boolean, false if the variable is unset, and `otherwise` if the value is no
    boolean. meaning: what happens in that case, for the log."""
    said = read(name).lower()
    if said and said not in TRUE + FALSE:
        complain(name, read(name), f"neither true (1, true, yes, on) nor false (0, false, no, off); {meaning}")
        return otherwise
    return said in TRUE


def home_folder() -> Path | None:
    """Return the user's home folder, None if there is none: the user is unknown and HOME is unset."""
    home = os.path.expanduser("~")
    return Path(home) if os.path.isabs(home) else None
