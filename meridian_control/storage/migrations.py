"""The database's schema, as a list of migration steps.

Each step runs once, in order, in one transaction under a lock, so that replicas may start at the same time. Steps only
add tables and columns that an older version can do without, because older versions use the same database during an
upgrade and after an upgrade is rolled back. The statements mean the same to SQLite and PostgreSQL.
"""

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

STEPS: tuple[tuple[str, ...], ...] = (
    (
        # Databases that are older than these migration steps already contain this table.
        """CREATE TABLE IF NOT EXISTS policy_revisions (
            revision INTEGER NOT NULL PRIMARY KEY,
            etag VARCHAR(64) NOT NULL,
            policy TEXT NOT NULL,
            author TEXT NOT NULL,
            reason TEXT NOT NULL,
            created_at TIMESTAMPTZ NOT NULL
        )""",
    ),
    (
        "ALTER TABLE policy_revisions ADD COLUMN request_id VARCHAR(128)",
        "CREATE UNIQUE INDEX policy_revisions_request_id ON policy_revisions (request_id)",
    ),
    (
        """CREATE TABLE replicas (
            replica_id VARCHAR(128) NOT NULL PRIMARY KEY,
            address TEXT NOT NULL,
            heartbeat_at TIMESTAMPTZ NOT NULL
        )""",
        # The table has one row: the replica that leads, a token that counts the leaders so far, and when the lead ends.
        """CREATE TABLE leader (
            number INTEGER NOT NULL PRIMARY KEY,
            replica_id VARCHAR(128) NOT NULL,
            token BIGINT NOT NULL,
            expires_at TIMESTAMPTZ NOT NULL
        )""",
    ),
    (
        """CREATE TABLE audit_records (
            id BIGINT NOT NULL PRIMARY KEY,
            time TIMESTAMPTZ NOT NULL,
            principal TEXT NOT NULL,
            role VARCHAR(16) NOT NULL,
            peer TEXT NOT NULL,
            method TEXT NOT NULL,
            request_id TEXT NOT NULL,
            reason TEXT NOT NULL,
            details TEXT NOT NULL,
            before_etag TEXT NOT NULL,
            after_etag TEXT NOT NULL,
            outcome VARCHAR(32) NOT NULL,
            error TEXT NOT NULL
        )""",
    ),
    (
        """CREATE TABLE freezes (
            freeze_id INTEGER NOT NULL PRIMARY KEY,
            engines TEXT NOT NULL,
            author TEXT NOT NULL,
            reason TEXT NOT NULL,
            create_time TIMESTAMPTZ NOT NULL,
            end_time TIMESTAMPTZ NOT NULL
        )""",
    ),
    (
        # `active` is 1 for the active rollout and NULL for the others. The column is unique, so one at most is active.
        """CREATE TABLE rollouts (
            rollout_id INTEGER NOT NULL PRIMARY KEY,
            active INTEGER UNIQUE,
            candidate_revision INTEGER NOT NULL,
            version INTEGER NOT NULL,
            request_id VARCHAR(128) UNIQUE,
            rollout TEXT NOT NULL
        )""",
    ),
    (
        """CREATE TABLE budgets (
            name VARCHAR(64) NOT NULL PRIMARY KEY,
            used_tokens BIGINT NOT NULL,
            minute_missing DOUBLE PRECISION NOT NULL,
            day_missing DOUBLE PRECISION NOT NULL,
            updated_at TIMESTAMPTZ NOT NULL
        )""",
    ),
    (
        # The table has one row, with a JSON document.
        """CREATE TABLE known_engines (
            number INTEGER NOT NULL PRIMARY KEY,
            engines TEXT NOT NULL
        )""",
    ),
)

# An arbitrary number, which must be the same in every replica.
ADVISORY_LOCK = 7_346_910_121


async def migrate(connection: AsyncConnection) -> None:
    """Bring the database to this version's schema; a newer schema stays as it is.

    The connection must be at the beginning of a transaction.
    """
    postgres = connection.dialect.name == "postgresql"
    await connection.execute(text(f"SELECT pg_advisory_xact_lock({ADVISORY_LOCK})" if postgres else "BEGIN IMMEDIATE"))
    await connection.execute(text("CREATE TABLE IF NOT EXISTS meridian_schema (version INTEGER NOT NULL PRIMARY KEY)"))
    done = await connection.scalar(text("SELECT max(version) FROM meridian_schema")) or 0
    for version, statements in enumerate(STEPS[done:], done + 1):
        for statement in statements:
            await connection.execute(text(statement))
        await connection.execute(text("INSERT INTO meridian_schema VALUES (:version)"), {"version": version})
