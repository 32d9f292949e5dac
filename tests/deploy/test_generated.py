"""The generated rules, dashboards and catalogue are up to date, can be parsed, and use only existing metrics."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from deploy import generate
from deploy.chart import CHART
from deploy.dashboards import DASHBOARDS
from deploy.generate import ADDONS, HERE, RULES, generated
from meridian_control.capabilities.listed import CAPABILITIES
from meridian_control.telemetry.catalogue import catalogue
from tests.needed import PROMTOOL

PROMETHEUS_OWN = {"up"}
ALERTS: dict[str, dict[str, Any]] = {
    rule["alert"]: rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
}
PANELS = [
    pytest.param(target["expr"], id=f"{name}: {panel['title']} {target['refId']}")
    for name, content in DASHBOARDS.items()
    for panel in content["panels"]
    for target in panel.get("targets", ())
]


def test_what_is_generated_is_fresh() -> None:
    stale = [path.name for path, text in generated().items() if path.read_text("utf-8") != text]
    assert not stale, "run python -m deploy.generate --write"


def selectors(expression: str) -> list[promql_parser.VectorSelector]:
    """Return the vector selectors of a query. Raises ValueError if the query cannot be parsed."""
    found: list[promql_parser.VectorSelector] = []

    def visit(node: promql_parser.Expr) -> bool:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)
        elif isinstance(node, promql_parser.MatrixSelector):
            found.append(node.vector_selector)
        return True

    promql_parser.walk(promql_parser.parse(expression), visit)
    assert found
    return found


def metric(name: str | None) -> str:
    """Return the metric to which a sample's name belongs."""
    return re.sub("_(bucket|sum|count)$", "", name or "")


def check(expression: str) -> None:
    """Check that the expression's metrics exist and have the labels that it uses."""
    for selector in selectors(re.sub(r"\$(engine|model|tenant)", "e", expression.replace("$__rate_interval", "5m"))):
        if selector.name not in PROMETHEUS_OWN:
            entry = catalogue(CAPABILITIES)[metric(selector.name)]
            asked = set(re.findall(r"(\w+)(?:=~|!~|!=|=)\"", str(selector.matchers)))
            assert asked <= set(entry.labels), f"{entry.name} has no {asked - set(entry.labels)}"


@pytest.mark.parametrize("expression", PANELS)
def test_every_panels_query_is_of_metrics_that_exist(expression: str) -> None:
    check(expression)


@pytest.mark.parametrize("name", list(ALERTS))
def test_every_alert_is_of_metrics_that_exist_and_has_a_runbook(name: str) -> None:
    rule = ALERTS[name]
    check(rule["expr"])
    address, anchor = rule["annotations"]["runbook_url"].split("#")
    assert address.startswith("https://")
    headings = [line.removeprefix("## ") for line in (HERE / address.rpartition("/")[2]).read_text().splitlines()]
    assert anchor in [heading.lower() for heading in headings if heading == name]


def test_another_address_of_the_runbooks_reaches_alerts_and_chart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RULES", "RULES_TEST"):
        file = getattr(generate, name)
        (tmp_path / file.name).write_text(file.read_text())
        monkeypatch.setattr(generate, name, tmp_path / file.name)
    generate.set_runbooks("https://wiki/runbooks")
    assert generate.runbooks() == "https://wiki/runbooks"
    for changed in tmp_path.iterdir():
        text = changed.read_text()
        assert text.count("runbook_url: https://wiki/runbooks#") == text.count("runbook_url:") > 0
    files = generate.generated()
    rule = files[ADDONS / "monitoring" / "prometheusrule.yaml"]
    assert rule.count("runbook_url: https://wiki/runbooks#") == len(ALERTS)
    assert yaml.safe_load(files[CHART / "values.yaml"])["prometheusRule"]["runbooks"] == "https://wiki/runbooks"


@pytest.mark.parametrize("expression", ["sum(meridian_no_such_total)", 'meridian_engines{engine="a"}', "sum(up"])
def test_a_wrong_query_is_found(expression: str) -> None:
    with pytest.raises((KeyError, AssertionError, ValueError)):
        check(expression)


def test_every_alert_is_tested_for_firing_and_for_silence() -> None:
    well, ill = yaml.safe_load((RULES.parent / "rules_test.yaml").read_text())["tests"]
    assert [case["alertname"] for case in well["alert_rule_test"] if "exp_alerts" not in case] == list(ALERTS)
    assert [case["alertname"] for case in ill["alert_rule_test"] if case["exp_alerts"]] == list(ALERTS)


@PROMTOOL.mark
def test_the_alerts_in_promtool() -> None:
    for command in ("check rules rules.yaml", "test rules rules_test.yaml"):
        done = subprocess.run(
            ["promtool", *command.split()], cwd=RULES.parent, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


# An engine that is at two replicas for a scrape, because it has just moved, and one that has not. Each has three
# requests that think, one of them preempted, and one that answers.
MOVING: dict[str, float] = {
    f"{name},{where}{more}": value
    for where in ('engine="moves",instance="a"', 'engine="moves",instance="b"', 'engine="stays",instance="b"')
    for name, more, value in (
        ("meridian_engine_info", ',model="m",vllm_version="1",agent_version="2"', 1),
        ("meridian_engine_requests", ',phase="think",state="generating"', 2),
        ("meridian_engine_requests", ',phase="think",state="preempted"', 1),
        ("meridian_engine_requests", ',phase="output",state="generating"', 1),
        ("meridian_engine_running_requests", "", 4),
        ("meridian_engine_waiting_requests", "", 5),
        ("meridian_engine_kv_used_ratio", "", 0.75 if "moves" in where else 0.25),
        ("meridian_engine_revision", "", 7),
        ("meridian_engine_wanted_revision", "", 8 if "moves" in where else 7),
        ("meridian_engine_refused", "", int("moves" in where)),
    )
}
REPLICAS: dict[str, float] = {
    'meridian_engines_without_series,instance="a"': 0,
    'meridian_engines_without_series,instance="b"': 3,
    'meridian_engines,instance="a"': 1,
    'meridian_engines,instance="b"': 2,
}
IDLE: dict[str, float] = {'meridian_engines_without_series,instance="a"': 0, 'meridian_engines,instance="a"': 0}
# An engine whose agent takes a tenth of a core and that moves to another replica and back.
BACK: dict[str, float | str] = {
    'meridian_agent_seconds_total,engine="back",part="hooks",instance="a"': "0+6x5 stale _ 48+6x2",
    'meridian_agent_seconds_total,engine="back",part="hooks",instance="b"': "_x6 36+6x1 stale",
}
SHOWN: dict[str, tuple[str, Mapping[str, float | str], dict[str, dict[str, float]]]] = {
    "an engine comes back": (
        "engine",
        BACK,
        {"Agent, share of a core, by part": {'{engine="back",part="hooks"}': 0.1}},
    ),
    "an engine comes back, a number": ("fleet", BACK, {"Agent, share of a core": {"{}": 0.1}}),
    "an engine moves": (
        "fleet",
        MOVING | REPLICAS,
        {
            "Engines connected": {"{}": 5},
            "Thinking now": {"{}": 4},
            "Answering now": {"{}": 2},
            "Requests A": {"{}": 8},
            "Requests B": {"{}": 10},
            "Requests by phase": {'{phase="think"}': 6, '{phase="output"}': 2},
            "KV cache in use B": {"{}": 0.5},
        },
    ),
    "an engine moves, revisions": (
        "rollout",
        MOVING,
        {
            "Engines by revision applied": {'{revision="7"}': 2},
            "Engines by revision wanted": {'{revision="7"}': 1, '{revision="8"}': 1},
            "Engines that are behind A": {"{}": 1},
            "Engines that are behind B": {"{}": 1},
            "Engines by version": {'{vllm_version="1",agent_version="2"}': 2},
        },
    ),
    "no engine": ("fleet", IDLE, {"Engines connected": {"{}": 0}, "Thinking now": {"{}": 0}}),
    "two kinds of shortening": (
        "fleet",
        {
            f'meridian_compared_ends_total,kind="{kind}",name="",end="natural",event="{event}"': per_minute
            for kind, ends, reentries in (("cap", 90, 9), ("entropy", 10, 5))
            for event, per_minute in (("ended", ends), ("reentry", reentries))
        },
        {
            "After forced and natural ends of thinking A": {
                '{kind="cap",end="natural"}': 0.1,
                '{kind="entropy",end="natural"}': 0.5,
            }
        },
    ),
}


@PROMTOOL.mark
@pytest.mark.parametrize(("dashboard", "given", "shown"), list(SHOWN.values()), ids=list(SHOWN))
def test_what_panels_show(
    tmp_path: Path, dashboard: str, given: Mapping[str, float | str], shown: dict[str, dict[str, float]]
) -> None:
    """given: the series of gauges with their value, and of counters with their growth in a minute, or series in
    promtool's form. shown: the value of each line by panel, with the query if the panel has several."""
    series = []
    for selected, value in given.items():
        name, _, labels = selected.partition(",")
        constant = f"0+{value}x10" if name.endswith("_total") else f"{value}x10"
        values = value if isinstance(value, str) else constant
        series.append({"series": f"{name}{{{labels}}}", "values": values})
    queries = {
        name: target["expr"]
        for panel in DASHBOARDS[dashboard]["panels"]
        for target in panel.get("targets", ())
        for name in (panel["title"], f"{panel['title']} {target['refId']}")
    }
    expressions = [
        {
            "expr": queries[name].replace("$__rate_interval", "10m").replace("$engine", ".*"),
            "eval_time": "10m",
            "exp_samples": [{"labels": labels, "value": value} for labels, value in lines.items()],
        }
        for name, lines in shown.items()
    ]
    file = tmp_path / "panels.yaml"
    file.write_text(
        yaml.safe_dump({"tests": [{"interval": "1m", "input_series": series, "promql_expr_test": expressions}]})
    )
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", list(DASHBOARDS))
def test_a_dashboard_has_ids_titles_and_places_of_its_own(name: str) -> None:
    content = json.loads((ADDONS / "dashboards" / f"{name}.json").read_text())
    panels = content["panels"]
    rows = [panel for panel in panels if panel["type"] == "row"]
    assert panels[0] is rows[0]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}) == len(panels)
    shown = [panel for panel in panels if panel not in rows]
    assert {panel["datasource"]["uid"] for panel in shown} == {"${datasource}"}
    assert all(panel["description"] for panel in shown), "an operator must know what a panel says"
    taken = [(x, y) for panel in panels for x, y in cells(panel["gridPos"])]
    assert len(taken) == len(set(taken)), "panels overlap"
    assert max(x for x, _ in taken) < 24


def cells(place: dict[str, int]) -> list[tuple[int, int]]:
    """Return the cells of Grafana's grid that a panel covers."""
    return [(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])]


@pytest.mark.parametrize("name", list(DASHBOARDS))
def test_a_dashboard_marks_revisions_freezes_and_rollouts(name: str) -> None:
    marks = {mark["name"]: mark["expr"] for mark in DASHBOARDS[name]["annotations"]["list"]}
    assert set(marks) == {"Policy", "Freeze", "Rollout"}
    for expression in marks.values():
        check(expression)


@pytest.mark.parametrize("name", list(DASHBOARDS))
def test_a_dashboards_variables_are_labels_that_exist(name: str) -> None:
    content = DASHBOARDS[name]
    variables = {one["name"]: one for one in content["templating"]["list"] if one["type"] == "query"}
    used = set(re.findall(r"\$(engine|model|tenant)\b", json.dumps(content["panels"])))
    assert used <= set(variables)
    for one in variables.values():
        metric_name, labels = re.fullmatch(r"label_values\((\w+).*, (\w+)\)", one["query"]["query"]).groups()  # type: ignore[union-attr]
        assert labels in catalogue(CAPABILITIES)[metric_name].labels
