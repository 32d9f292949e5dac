"""Fixtures that several folders share."""

from collections.abc import Iterator

import pytest

from tests.postgres import Postgres


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """One PostgreSQL server for the session, started when the first test asks for it."""
    server = Postgres()
    yield server
    server.stop()
