"""An engine on the link, for the tests of the stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.fakes.linked import LinkedEngine, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.contract.streams import Control


@pytest.fixture
async def engine(control: Control) -> AsyncIterator[LinkedEngine]:
    """Yield an idle engine that obeys the control plane's first policy."""
    with LinkedEngine([control.target]) as engine:
        await until(lambda: control.connected() and control.engine().acked_revision == 1)
        yield engine
