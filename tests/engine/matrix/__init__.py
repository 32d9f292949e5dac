"""Every engine people run against everything the agent does there: features, each checked on each build it is for.

A feature is a function that gets a running governed engine with a stock one beside it and raises on any departure. The
builds are in `builds`, the features in `features`; `python -m tests.engine.matrix` runs them in whatever Python it is
started with, so with whatever vLLM that has, and `--save` keeps what came out in tests/data/matrix. Neither this module
nor the features' own import vLLM: what there is to check is known where there is none.
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
    """name: as in the table. check: raises on a departure."""

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
    """In the order they are written in."""
    from tests.engine.matrix import features

    return [f for f in features.all_of_them().values() if build in f.builds]
