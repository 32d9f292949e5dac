"""SQLite files with this version's schema, which are copies of one: a migration takes longer than many a test."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from sqlalchemy import create_engine

from meridian_control.storage import migrations


def migrated(path: Path) -> str:
    """Make the file unless it is there, and return its address for `Database.open`."""
    if not path.exists():
        path.write_bytes(_schema())
    return f"sqlite+aiosqlite:///{path}"


@functools.cache
def _schema() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "schema.db")
        engine = create_engine(f"sqlite:///{file}")
        with engine.begin() as connection:
            migrations._add_what_is_missing(connection)
        engine.dispose()
        return file.read_bytes()
