"""Writes the files in `deploy` that are generated: the dashboards, the PrometheusRule, the Helm chart, and the
catalogue of metrics in metrics.md.

`python -m deploy.generate` lists the stale files and exits with 1 if there are any; `--write` writes them. `--runbooks`
puts the address of your copy of alerts.md into the alerts first.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
RULES_TEST = RULES.with_name("rules_test.yaml")
FROM_RULES = "# deploy/generate.py generates this file from prometheus/rules.yaml.\n"
BEGIN, END = "<!-- catalogue: begin -->\n", "<!-- catalogue: end -->\n"


def generated() -> dict[Path, str]:
    """Return the content of each generated file by its path."""
    files = {
        ADDONS / "dashboards" / f"{name}.json": json.dumps(content, indent=1) + "\n"
        for name, content in DASHBOARDS.items()
    }
    rule = _rule()
    text = yaml.safe_dump(rule, sort_keys=False, width=120)
    files[ADDONS / "monitoring" / "prometheusrule.yaml"] = f"{FROM_RULES}{text}"
    guide = (HERE / "metrics.md").read_text(encoding="utf-8")
    before, after = guide.split(BEGIN)[0], guide.split(END)[1]
    files[HERE / "metrics.md"] = f"{before}{BEGIN}{_metrics()}{END}{after}"
    return files | chart(rule, runbooks())


def _metrics() -> str:
    """Return the catalogue of metrics as Markdown tables."""
    parts = []
    for title, entries in groups(CAPABILITIES).items():
        rows = [_row(entry) for entry in entries]
        parts.append("\n".join([f"**{title}**", "", "| metric | says | act on it |", "|---|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def _row(entry: Entry) -> str:
    labels = f"{{{', '.join(entry.labels)}}}" if entry.labels else ""
    kind = "histogram: " if entry.kind == "histogram" else ""
    return f"| `{entry.name}{labels}` | {kind}{entry.text} | {entry.act} |"


def _rule() -> dict[str, Any]:
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "meridian-control", "namespace": "meridian"},
        "spec": yaml.safe_load(RULES.read_text(encoding="utf-8")),
    }


def runbooks() -> str:
    """Return the address of the runbooks' page, which is the same in all alerts."""
    groups_of_alerts = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    (address,) = {
        alert["annotations"]["runbook_url"].partition("#")[0] for group in groups_of_alerts for alert in group["rules"]
    }
    return str(address)


def set_runbooks(address: str) -> None:
    """Put another address of the runbooks' page into the alerts and their test."""
    before = runbooks()
    for file in (RULES, RULES_TEST):
        text = file.read_text(encoding="utf-8")
        file.write_text(text.replace(f"runbook_url: {before}#", f"runbook_url: {address}#"), encoding="utf-8")


def main(write: bool) -> int:
    stale = [(path, text) for path, text in generated().items() if not path.exists() or path.read_text("utf-8") != text]
    for path, text in stale:
        print(f"{'written' if write else 'stale'}: {path.relative_to(HERE)}")
        if write:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return 1 if stale and not write else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m deploy.generate", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the files that are stale")
    parser.add_argument("--runbooks", metavar="URL", help="absolute address of your copy of deploy/alerts.md")
    asked = parser.parse_args()
    if asked.runbooks:
        set_runbooks(asked.runbooks)
    sys.exit(main(asked.write))
