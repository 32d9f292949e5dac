"""Brings a database to this version's schema by adding the tables, columns and indexes that it lacks, and 64 bits to
integers that have 32.

All of that is one transaction under a lock, so that replicas may start at the same time.
"""

from sqlalchemy import BigInteger, Connection, func, insert, inspect, select, text
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.schema import CreateColumn

from meridian_control.storage.tables import METADATA, VERSION, versions

# An arbitrary number, which must be the same in every replica.
ADVISORY_LOCK = 7_346_910_121


async def migrate(connection: AsyncConnection) -> None:
    """Bring the database to this version's schema; a newer schema stays as it is.

    The connection must be at the beginning of a transaction.
    """
    postgres = connection.dialect.name == "postgresql"
    await connection.execute(text(f"SELECT pg_advisory_xact_lock({ADVISORY_LOCK})" if postgres else "BEGIN IMMEDIATE"))
    await connection.run_sync(_add_what_is_missing)


def _add_what_is_missing(connection: Connection) -> None:
    versions.create(connection, checkfirst=True)
    if (connection.scalar(select(func.max(versions.c.version))) or 0) >= VERSION:
        return
    inspector, is_postgres = inspect(connection), connection.dialect.name == "postgresql"
    older = [table for table in METADATA.sorted_tables if inspector.has_table(table.name)]
    METADATA.create_all(connection, [table for table in METADATA.sorted_tables if table not in older], checkfirst=False)
    for table in older:
        present = {column["name"]: column["type"] for column in inspector.get_columns(table.name)}
        for column in table.columns:
            if column.name not in present:
                added = CreateColumn(column).compile(dialect=connection.dialect)
                connection.execute(text(f"ALTER TABLE {table.name} ADD COLUMN {added}"))
            elif (
                is_postgres and isinstance(column.type, BigInteger) and not isinstance(present[column.name], BigInteger)
            ):
                connection.execute(text(f"ALTER TABLE {table.name} ALTER COLUMN {column.name} TYPE BIGINT"))
                sequence = connection.scalar(select(func.pg_get_serial_sequence(table.name, column.name)))
                if sequence is not None:
                    connection.execute(text(f"ALTER SEQUENCE {sequence} AS BIGINT"))
        for index in table.indexes:
            index.create(connection, checkfirst=True)
    connection.execute(insert(versions).values(version=VERSION))
