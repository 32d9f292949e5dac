"""A store that is lost at a chosen moment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import event

from meridian_control.storage.database import Database

LOST = "the disk is gone"


@contextmanager
def lost_after(database: Database, *writes: str) -> Iterator[None]:
    """Let each reading of the database fail once a statement that begins with one of these texts has been made."""
    is_lost = False

    def lose(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        nonlocal is_lost
        if is_lost and statement.startswith("SELECT"):
            raise OSError(LOST)
        is_lost |= statement.startswith(writes)

    engine = database._engine.sync_engine
    event.listen(engine, "before_cursor_execute", lose)
    try:
        yield
    finally:
        event.remove(engine, "before_cursor_execute", lose)
        assert is_lost
