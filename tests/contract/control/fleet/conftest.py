from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.replicated import Replicated

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.postgres import Postgres


@pytest.fixture
def replicated(tmp_path: Path, postgres: Postgres) -> Iterator[Replicated]:
    made = Replicated(tmp_path, postgres, still=True)
    yield made
    for process in made.processes:
        process.kill()
        assert "Traceback" not in process.log()
