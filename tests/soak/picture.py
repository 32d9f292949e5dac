"""Draw a picture of a soak: memory by role, tokens and requests per second, and the times of faults."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

if TYPE_CHECKING:
    from pathlib import Path

    from tests.soak.watch import Sample

Rates = list[tuple[float, float, float]]


def draw(samples: list[Sample], rates: Rates, events: list[tuple[float, str]], path: Path) -> None:
    """Draw the picture. Times are seconds since the soak began; rates: (seconds, requests/s, tokens/s)."""
    figure, (memory, work, faults) = plt.subplots(3, 1, figsize=(11, 9), sharex=True, height_ratios=(2, 2, 1.4))
    for role in sorted({one.role for one in samples}):
        own = [one for one in samples if one.role == role]
        memory.plot([o.at_s for o in own], [o.rss_mb - own[0].rss_mb for o in own], ".", markersize=2, label=role)
    memory.set_ylabel("memory over the first sample, MB")
    memory.legend(loc="upper left", markerscale=4)
    work.plot([at for at, *_ in rates], [tokens for *_, tokens in rates], color="tab:blue")
    work.set_ylabel("tokens per second", color="tab:blue")
    requests = work.twinx()
    requests.plot([at for at, *_ in rates], [count for _, count, _ in rates], color="tab:orange")
    requests.set_ylabel("requests per second", color="tab:orange")
    kinds = sorted({kind for _, kind in events})
    faults.plot([at for at, _ in events], [kinds.index(kind) for _, kind in events], "|", color="black")
    faults.set_yticks(range(len(kinds)), kinds)
    faults.set_xlabel("seconds")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
