from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.postgres import Postgres
from tests.replicated import Replicated


@pytest.fixture
def replicated(tmp_path: Path, postgres: Postgres) -> Iterator[Replicated]:
    made = Replicated(tmp_path, postgres, still=True)
    yield made
    for process in made.processes:
        process.kill()
        assert "Traceback" not in process.log()
