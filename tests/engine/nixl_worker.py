"""A CPU worker beside NIXL on a machine whose cores other programs use, too."""

from __future__ import annotations

import os
import time
from typing import Any

from tests.demo.pace import STEP_MS, PacedWorker
from tests.engine.matrix.connectors import courteous


class Worker(PacedWorker):
    """Stretches also the steps without tokens, of which vLLM makes one after the other while KV is on its way or waits
    to be read: to ten times as long, because a test waits for the end of a lease, and each step takes a core's time."""

    def initialize_from_config(self, *args: Any, **kwargs: Any) -> Any:
        with courteous():
            return super().initialize_from_config(*args, **kwargs)

    def execute_model(self, scheduler_output: Any) -> Any:
        if not scheduler_output.total_num_scheduled_tokens:
            time.sleep(10 * float(os.environ[STEP_MS]) / 1e3)
        return super().execute_model(scheduler_output)
