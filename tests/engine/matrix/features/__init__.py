"""The features, by what they are about; importing a module registers its own."""

from __future__ import annotations

from tests.engine.matrix import FEATURES, Feature
from tests.engine.matrix.features import asked, connectors, forces, groups, markers, parallel, scheduling, signals

MODULES = (signals, forces, asked, scheduling, markers, parallel, groups, connectors)


def all_of_them() -> dict[str, Feature]:
    return FEATURES
