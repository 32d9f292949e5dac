"""The features of the agent, grouped by subject; importing a module registers its features."""

from __future__ import annotations

from tests.engine.matrix import FEATURES, Feature
from tests.engine.matrix.features import (
    asked,
    connectors,
    forces,
    groups,
    handovers,
    markers,
    parallel,
    preemption,
    scheduling,
    signals,
    vocabularies,
    weights,
)

MODULES = (
    signals,
    forces,
    asked,
    scheduling,
    markers,
    parallel,
    groups,
    connectors,
    handovers,
    preemption,
    vocabularies,
    weights,
)


def all_of_them() -> dict[str, Feature]:
    return FEATURES
