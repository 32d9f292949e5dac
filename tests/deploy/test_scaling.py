"""Queries and specifications in the examples of routing and scaling name series that vLLM exposes with the agent."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.generate import HERE
from meridian_agent.vllm_adapter.server_metrics import KV_TOKENS, LABELS, NAMES, REQUESTS
from tests.deploy.test_generated import selectors

EXAMPLES = HERE / "kubernetes" / "examples" / "scaling"
# Labels that Prometheus adds to the series of a pod.
OF_PODS = {"namespace", "pod"}


def loaded(name: str) -> Any:
    return yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())


def adapter_query(rule: dict[str, Any], template: str) -> str:
    """Return a query that the Prometheus adapter makes of a rule's template."""
    series = rule["seriesQuery"].partition("{")[0]
    parts = {"Series": series, "LabelMatchers": 'namespace="a",pod=~"b|c"', "GroupBy": "pod"}
    return re.sub(r"<<\.(\w+)>>", lambda found: parts[found[1]], template)


def queries() -> dict[str, str]:
    found = {t["name"]: t["metadata"]["query"] for t in loaded("keda")["spec"]["triggers"]}
    for rule in loaded("prometheus-adapter")["rules"]:
        name = rule["name"]["as"]
        found |= {name: adapter_query(rule, rule["metricsQuery"]), f"{name} series": rule["seriesQuery"]}
    return found


@pytest.mark.parametrize("name", list(queries()))
def test_a_query_is_of_series_that_exist(name: str) -> None:
    for selector in selectors(queries()[name]):
        assert selector.name in (REQUESTS, KV_TOKENS)
        asked = dict(re.findall(r'(\w+)(?:=~|!=|=)"([^"]*)"', str(selector.matchers)))
        assert asked.keys() <= {*LABELS, *OF_PODS, "phase"}
        assert set(asked.get("phase", NAMES[0]).split("|")) <= set(NAMES)


@pytest.mark.parametrize(
    "pair", [("answering", "thinking"), ("meridian_answering_requests", "meridian_thinking_requests")]
)
def test_each_phase_counts_in_one_of_two_queries(pair: tuple[str, str]) -> None:
    phases = [set(re.findall(r'phase=~"([^"]*)"', queries()[name])[0].split("|")) for name in pair]
    assert phases[0] | phases[1] == set(NAMES)
    assert not phases[0] & phases[1]
    assert "unknown" in phases[0], "a fault of an agent would look like less load"


def test_the_autoscaler_reads_what_the_adapter_makes_and_asks_for_as_many_pods_as_keda() -> None:
    made = [rule["name"]["as"] for rule in loaded("prometheus-adapter")["rules"]]
    metrics = [metric["pods"] for metric in loaded("hpa")["spec"]["metrics"]]
    assert [metric["metric"]["name"] for metric in metrics] == made
    triggers = loaded("keda")["spec"]["triggers"]
    wanted = {f"meridian_{trigger['name']}_requests": trigger["metadata"]["threshold"] for trigger in triggers}
    assert {metric["metric"]["name"]: metric["target"]["averageValue"] for metric in metrics} == wanted


def test_the_endpoint_pickers_parts_fit_each_other() -> None:
    config = loaded("endpoint-picker")
    plugins = {plugin.get("name", plugin["type"]): plugin for plugin in config["plugins"]}
    assert len(plugins) == len(config["plugins"])
    used = [entry["pluginRef"] for profile in config["schedulingProfiles"] for entry in profile["plugins"]]
    for source in config["dataLayer"]["sources"]:
        used += [source["pluginRef"], *(extractor["pluginRef"] for extractor in source["extractors"])]
    assert plugins.keys() == {*used, "single-profile-handler"}

    (engine,) = plugins["core-metrics-extractor"]["parameters"]["engineConfigs"]
    custom = {entry["attributeKey"]: entry["metricSpec"] for entry in engine.pop("customMetrics")}
    scorers = [plugin["parameters"] for plugin in plugins.values() if plugin["type"] == "endpoint-attribute-scorer"]
    assert {scorer["attributeKey"] for scorer in scorers} == custom.keys()
    assert {scorer["algorithm"]["type"] for scorer in scorers} == {"linear_lower_is_better"}
    for spec in custom.values():
        found = re.fullmatch(r"(\w+)\{phase=(\w+)\}", spec)
        assert found is not None, spec
        assert (found[1], found[2] in NAMES) == (REQUESTS, True)

    # vLLM itself is not imported, which would take seconds.
    package = importlib.util.find_spec("vllm")
    assert package is not None
    assert package.origin is not None
    exposed = (Path(package.origin).parent / "v1/metrics/loggers.py").read_text()
    assert engine.pop("name") == "vllm"
    for spec in engine.values():
        assert f'"{spec}"' in exposed, spec
