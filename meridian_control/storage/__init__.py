"""The database underneath every store, SQLite or PostgreSQL. Knows no table but its own."""
