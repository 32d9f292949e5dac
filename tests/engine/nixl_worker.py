"""A CPU worker beside NIXL on a machine whose cores other programs use, too."""

from __future__ import annotations

from typing import Any

from tests.demo.pace import PacedWorker
from tests.engine.matrix.connectors import courteous


class Worker(PacedWorker):
    """Runs NIXL's own threads behind other programs."""

    def initialize_from_config(self, *args: Any, **kwargs: Any) -> Any:
        with courteous():
            return super().initialize_from_config(*args, **kwargs)
