"""A fixture with the emulated network; tests that need it are skipped if it cannot be made."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.chaos.network import Network, NoNamespacesError
from tests.needed import NETWORK

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    try:
        network = Network(seed=3)
    except NoNamespacesError as error:
        pytest.skip(f"{error}; {NETWORK.reason}")
    yield network
    network.stop()
