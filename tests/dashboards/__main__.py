"""Run `python -m tests.dashboards` (about five minutes); it needs Debian's `prometheus`, or another one by
--prometheus.

The program prints the number of series of each panel of each dashboard, and writes Prometheus's answers to panels.json.
The exit status is 1 if a query fails or has no value, because its panel would be empty.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import urllib.parse
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

from deploy.dashboards import DASHBOARDS, SCRAPED
from tests.dashboards.fleet import Fleet

STEP_S, RATE_S = 2, 15


def asked(prometheus: str, expression: str, began: float, ended: float) -> list[dict[str, Any]]:
    """Return the series of a query with the parameters that Grafana would send. Raises HTTPError."""
    names = ("$engine", "$model", "$tenant")
    for name, value in (
        ("$__rate_interval", f"{RATE_S}s"),
        (f":{SCRAPED}]", f":{STEP_S}s]"),
        *((name, ".*") for name in names),
    ):
        expression = expression.replace(name, value)
    query = urllib.parse.urlencode({"query": expression, "start": began, "end": ended, "step": STEP_S})
    with urllib.request.urlopen(f"{prometheus}/api/v1/query_range?{query}", timeout=30) as answer:
        found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return found


def panels(prometheus: str, began: float, ended: float) -> list[dict[str, Any]]:
    """Return each dashboard's panels with Prometheus's answer to each of their queries."""
    return [
        {
            "dashboard": name,
            "panel": panel,
            "results": [asked(prometheus, target["expr"], began, ended) for target in panel["targets"]],
        }
        for name, content in DASHBOARDS.items()
        for panel in content["panels"]
        if panel["type"] != "row"
    ]


async def run(folder: Path, prometheus: str, stretch_s: float) -> int:
    with closing(Fleet(folder, prometheus)) as fleet:
        await fleet.started()
        began, ended = await fleet.live(stretch_s)
        shown = await asyncio.to_thread(panels, f"http://{fleet.prometheus}", began, ended)
    (folder / "panels.json").write_text(json.dumps({"began": began, "ended": ended, "panels": shown}))
    empty = 0
    for each in shown:
        counts = [len(series) for series in each["results"]]
        empty += counts.count(0)
        print(f"{each['dashboard']:8} {each['panel']['title']:50} {' '.join(map(str, counts))}")
    print(f"{len(shown)} panels, {sum(len(each['results']) for each in shown)} queries, {empty} without a value")
    return 1 if empty else 0


def main() -> int:
    p = argparse.ArgumentParser(prog="python -m tests.dashboards", description=__doc__)
    p.add_argument("--prometheus", default="prometheus", help="its program")
    p.add_argument("--stretch", type=float, default=40.0, help="seconds between two events")
    p.add_argument("--output", type=Path, default=Path("build/dashboards"), help="folder for logs and panels.json")
    args = p.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    return asyncio.run(run(args.output.resolve(), args.prometheus, args.stretch))


if __name__ == "__main__":
    sys.exit(main())
