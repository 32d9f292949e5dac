"""Every kind of engine that people run, with every feature of the agent checked on each build that it applies to.

A feature is a function that gets a running governed engine with a stock one beside it, and raises on any difference.
The builds are in `builds`, the features in `features`. `python -m tests.engine.matrix` runs them with the vLLM of the
Python that runs it, and `--save` keeps the results in tests/data/matrix. Neither this module nor the features' modules
import vLLM, so that the list of checks is also known without vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.engine.matrix.builds import BUILDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.engine.matrix.engine import Engine


@dataclass(frozen=True)
class Feature:
    """A feature. name: as in the table. check: raises if the engine differs from what is expected."""

    name: str
    check: Callable[[Engine], None]
    builds: tuple[str, ...]


FEATURES: dict[str, Feature] = {}


def feature(name: str, *builds: str) -> Callable[[Callable[[Engine], None]], Callable[[Engine], None]]:
    """Register the function as the check of a feature on these builds."""

    def register(check: Callable[[Engine], None]) -> Callable[[Engine], None]:
        assert name not in FEATURES, name
        assert set(builds) <= set(BUILDS), builds
        FEATURES[name] = Feature(name, check, builds)
        return check

    return register


def features_of(build: str) -> list[Feature]:
    """Return the features of a build in the order in which they are written."""
    from tests.engine.matrix import features

    return [f for f in features.all_of_them().values() if build in f.builds]
