"""The policy database's schema, as the steps that lead to it.

Each step runs once, in order, in one transaction under a lock, so that replicas may start at the same time. Steps only
add what an older version can do without: during an upgrade, and after one that is taken back, older versions go on
working on the same database. The statements mean the same to SQLite and PostgreSQL.
"""

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

STEPS: tuple[tuple[str, ...], ...] = (
    (
        # Databases older than these steps have it already.
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
        # One row: who leads, the how manieth leader that is, and until when.
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
        # 1 in the active one, else NULL, so that there is one at most.
        """CREATE TABLE rollouts (
            rollout_id INTEGER NOT NULL PRIMARY KEY,
            active INTEGER UNIQUE,
            candidate_revision INTEGER NOT NULL,
            version INTEGER NOT NULL,
            request_id VARCHAR(128) UNIQUE,
            rollout TEXT NOT NULL
        )""",
    ),
)

# Any number, the same in every replica.
ADVISORY_LOCK = 7_346_910_121


async def migrate(connection: AsyncConnection) -> None:
    """Bring the database to this version's schema; one that is ahead stays as it is. In a transaction of its own."""
    postgres = connection.dialect.name == "postgresql"
    await connection.execute(text(f"SELECT pg_advisory_xact_lock({ADVISORY_LOCK})" if postgres else "BEGIN IMMEDIATE"))
    await connection.execute(text("CREATE TABLE IF NOT EXISTS meridian_schema (version INTEGER NOT NULL PRIMARY KEY)"))
    done = await connection.scalar(text("SELECT max(version) FROM meridian_schema")) or 0
    for version, statements in enumerate(STEPS[done:], done + 1):
        for statement in statements:
            await connection.execute(text(statement))
        await connection.execute(text("INSERT INTO meridian_schema VALUES (:version)"), {"version": version})
