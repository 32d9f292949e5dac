"""The database that every store uses, SQLite or PostgreSQL, and its schema. The package reads no store's table."""
