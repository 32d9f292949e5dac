"""The text of a policy in the store, which the two previous versions read too."""

from __future__ import annotations

import sqlite3
import tomllib
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest

from meridian_control.policy.formats import parse_toml, to_stored_toml
from meridian_control.policy.model import Policy
from meridian_control.policy.store import PolicyStore
from meridian_control.storage.database import Database
from meridian_control.storage.tables import VERSION
from tests.processes import ROOT

POLICIES = ROOT / "tests" / "data" / "policies"
# Text that each previous version has stored. Beside each lies the schema that the version made.
BEFORE = {name: (POLICIES / f"stored-{name}.toml").read_text() for name in ("0.1.0", "0.2.0")}
NOW = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)


@pytest.mark.parametrize("version", BEFORE)
def test_a_previous_version_knows_every_field_of_a_policy_without_new_ones(version: str) -> None:
    """A previous version refuses a field that it does not know. It stored each other field, with its default too."""
    known, stored = tomllib.loads(BEFORE[version]), tomllib.loads(to_stored_toml(parse_toml(BEFORE[version])))
    (entry,), (before,) = stored.pop("override"), known.pop("override")
    assert entry.items() <= before.items()
    assert stored == known


NEW = {
    "loop": "loop.shadow = false",
    "engine": "engine.max_num_active_seqs = 9",
    "scheduler": "scheduler.answer_reserve_tokens = 1",
    "pressure": '[[pressure]]\nname = "p"\nqueueing_p99_ms = 1.0',
    "budget": '[[budget]]\nname = "b"\ntokens_per_minute = 1',
}


@pytest.mark.parametrize("section", NEW)
def test_a_new_field_with_a_value_of_its_own_is_kept(section: str) -> None:
    stored, defaults = (tomllib.loads(to_stored_toml(policy)) for policy in (parse_toml(NEW[section]), Policy()))
    assert {name for name in stored if stored[name] != defaults.get(name)} == {section}


@pytest.mark.parametrize("version", BEFORE)
async def test_a_file_of_a_previous_version(version: str, tmp_path: Path) -> None:
    """A file with a previous version's schema and policy is migrated, and a policy stored then has no new field."""
    told = BEFORE[version]
    file = f"sqlite+aiosqlite:///{tmp_path / 'policy.db'}"
    with closing(sqlite3.connect(tmp_path / "policy.db")) as connection, connection:
        connection.executescript((POLICIES / f"schema-{version}.sql").read_text())
        row = (1, "e", told, "ann", "why", NOW.isoformat(" "))
        connection.execute("INSERT INTO policy_revisions VALUES (?, ?, ?, ?, ?, ?, NULL)", row)
    store = PolicyStore(await Database.open(file))
    try:
        current = await store.current()
        assert current is not None
        assert current.policy == parse_toml(told)
        await store.append(current.policy, etag="e", author="ann", reason="again", now=NOW)
    finally:
        await store.database.close()
    with closing(sqlite3.connect(tmp_path / "policy.db")) as connection:
        ((text,),) = connection.execute("SELECT policy FROM policy_revisions WHERE revision = 2")
        ((number,),) = connection.execute("SELECT max(version) FROM meridian_schema")
        assert connection.execute("SELECT count(*) FROM budgets").fetchone() == (0,)
    assert text == to_stored_toml(parse_toml(told))
    assert number == VERSION
