"""The database that every store uses, SQLite or PostgreSQL. The package knows no table except its schema version."""
