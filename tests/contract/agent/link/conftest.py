"""An engine on the link, for the tests of the stream."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.contract.streams import Control
from tests.fakes.linked import LinkedEngine, until


@pytest.fixture
async def engine(control: Control) -> AsyncIterator[LinkedEngine]:
    """Yield an idle engine that obeys the control plane's first policy."""
    with LinkedEngine([control.target]) as engine:
        await until(lambda: control.connected() and control.engine().acked_revision == 1)
        yield engine
