"""Declares every table of the database, for the stores that read it and for the migration that creates it.

A version only adds tables and columns that an older version can do without, and 64 bits to integers that have 32,
because older versions use the same database during an upgrade and after an upgrade is rolled back. So a column added to
a table is nullable or has a server default, and none is removed; a change of this module raises VERSION.
"""

from datetime import datetime

from sqlalchemy import BigInteger, Column, DateTime, Float, Index, Integer, MetaData, String, Table, Text

VERSION = 12
MAX_REQUEST_ID_CHARS = 128
METADATA = MetaData()


def _time(name: str) -> Column[datetime]:
    return Column(name, DateTime(timezone=True), nullable=False)


versions = Table("meridian_schema", METADATA, Column("version", Integer, primary_key=True, autoincrement=False))

revisions = Table(
    "policy_revisions",
    METADATA,
    Column("revision", Integer, primary_key=True, autoincrement=False),
    Column("etag", String(64), nullable=False),
    # The policy as TOML text, so that an operator can read the column.
    Column("policy", Text, nullable=False),
    Column("author", Text, nullable=False),
    Column("reason", Text, nullable=False),
    _time("created_at"),
    Column("request_id", String(MAX_REQUEST_ID_CHARS)),
    # Why the control plane itself has stored the revision; null for others, and if an older version has stored it.
    Column("cause", String(32)),
    Index("policy_revisions_request_id", "request_id", unique=True),
)

replicas = Table(
    "replicas",
    METADATA,
    Column("replica_id", String(128), primary_key=True),
    Column("address", Text, nullable=False),
    _time("heartbeat_at"),
    Column("engines", Integer),
)

# The table has one row: the replica that leads, a token that counts the leaders so far, and when the lead ends.
leader = Table(
    "leader",
    METADATA,
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("replica_id", String(128), nullable=False),
    Column("token", BigInteger, nullable=False),
    _time("expires_at"),
)

audit_records = Table(
    "audit_records",
    METADATA,
    Column("id", BigInteger, primary_key=True, autoincrement=False),
    _time("time"),
    Column("principal", Text, nullable=False),
    Column("role", String(16), nullable=False),
    Column("peer", Text, nullable=False),
    Column("method", Text, nullable=False),
    Column("request_id", Text, nullable=False),
    Column("reason", Text, nullable=False),
    # The other fields of the request, as a JSON object of strings.
    Column("details", Text, nullable=False),
    Column("before_etag", Text, nullable=False),
    Column("after_etag", Text, nullable=False),
    Column("outcome", String(32), nullable=False),
    Column("error", Text, nullable=False),
)

freezes = Table(
    "freezes",
    METADATA,
    Column("freeze_id", Integer, primary_key=True, autoincrement=False),
    # The globs and labels of `Match` as JSON.
    Column("engines", Text, nullable=False),
    Column("author", Text, nullable=False),
    Column("reason", Text, nullable=False),
    _time("create_time"),
    _time("end_time"),
)

rollouts = Table(
    "rollouts",
    METADATA,
    Column("rollout_id", Integer, primary_key=True, autoincrement=False),
    # 1 for the active rollout, else NULL; the unique column allows at most one active rollout.
    Column("active", Integer, unique=True),
    Column("candidate_revision", Integer, nullable=False),
    Column("version", Integer, nullable=False),
    Column("request_id", String(MAX_REQUEST_ID_CHARS), unique=True),
    # The rollout as JSON.
    Column("rollout", Text, nullable=False),
)

budgets = Table(
    "budgets",
    METADATA,
    Column("name", String(64), primary_key=True),
    Column("used_tokens", BigInteger, nullable=False),
    Column("minute_missing", Float, nullable=False),
    Column("day_missing", Float, nullable=False),
    _time("updated_at"),
)

# The table has one row, with a JSON document.
known_engines = Table(
    "known_engines",
    METADATA,
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("engines", Text, nullable=False),
)

# Episodes of self-calibration, numbered in their order, each a JSON document.
episodes = Table(
    "self_calibration_episodes",
    METADATA,
    # A fleet that records 100 requests a second would use up 32 bits within a year.
    Column("number", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    Column("traffic", Text, nullable=False),
    _time("time"),
    Column("episode", Text, nullable=False),
    Index("self_calibration_episodes_traffic", "traffic", "number"),
)

# What self-calibration has found for each traffic, a JSON document.
found_rules = Table(
    "self_calibration_found",
    METADATA,
    Column("traffic", String(1024), primary_key=True),
    Column("found", Text, nullable=False),
)
