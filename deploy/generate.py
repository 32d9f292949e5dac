"""Writes the files in `deploy` that are generated: the dashboards, the PrometheusRule, the Helm chart, and the
catalogue of metrics in metrics.md.

`python -m deploy.generate` lists the stale files and exits with 1 if there are any; `--write` writes them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from deploy.chart import chart
from deploy.dashboards import DASHBOARDS
from meridian_control.capabilities.listed import CAPABILITIES
from meridian_control.telemetry.catalogue import groups

if TYPE_CHECKING:
    from meridian_control.common.metric_entry import Entry

HERE = Path(__file__).parent
ADDONS = HERE / "kubernetes" / "addons"
RULES = HERE / "prometheus" / "rules.yaml"
BEGIN, END = "<!-- catalogue: begin -->\n", "<!-- catalogue: end -->\n"


def generated() -> dict[Path, str]:
    """Return the content of each generated file by its path."""
    files = {
        ADDONS / "dashboards" / f"{name}.json": json.dumps(content, indent=1) + "\n"
        for name, content in DASHBOARDS.items()
    }
    files[ADDONS / "monitoring" / "prometheusrule.yaml"] = _rule()
    guide = (HERE / "metrics.md").read_text(encoding="utf-8")
    before, after = guide.split(BEGIN)[0], guide.split(END)[1]
    files[HERE / "metrics.md"] = f"{before}{BEGIN}{_metrics()}{END}{after}"
    return files | chart()


def _metrics() -> str:
    """Return the catalogue of metrics as Markdown tables."""
    parts = []
    for title, entries in groups(CAPABILITIES).items():
        rows = [_row(entry) for entry in entries]
        parts.append("\n".join([f"**{title}**", "", "| metric | says | act on it |", "|---|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def _row(entry: Entry) -> str:
    labels = f"{{{', '.join(entry.labels)}}}" if entry.labels else ""
    kind = "" if entry.kind == "gauge" else f"{entry.kind}: "
    return f"| `{entry.name}{labels}` | {kind}{entry.text} | {entry.act} |"


def _rule() -> str:
    spec = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "meridian-control", "namespace": "meridian"},
        "spec": spec,
    }
    text = yaml.safe_dump(rule, sort_keys=False, width=120)
    return f"# deploy/generate.py generates this file from prometheus/rules.yaml.\n{text}"


def main(write: bool) -> int:
    stale = [(path, text) for path, text in generated().items() if not path.exists() or path.read_text("utf-8") != text]
    for path, text in stale:
        print(f"{'written' if write else 'stale'}: {path.relative_to(HERE)}")
        if write:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return 1 if stale and not write else 0


if __name__ == "__main__":
    sys.exit(main("--write" in sys.argv[1:]))
