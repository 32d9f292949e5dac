"""The Helm chart renders what Kustomize renders, with Helm's own code."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from deploy.chart import CHART, KUBERNETES, STORES
from deploy.generate import RULES
from tests.deploy.rendering import objects, only, rendered
from tests.deploy.test_manifests import check
from tests.needed import HELM

if TYPE_CHECKING:
    from tests.deploy.rendering import Object

VALUES: dict[str, Object] = {
    "trial": {"store": "trial", "tls": {"enabled": False}},
    "sqlite": {},
    "postgres": {"store": "postgres", "replicas": 3},
}


def helm(values: Object, namespace: str = "meridian") -> list[Object]:
    """Return the objects of the chart; without Helm's code the calling test is skipped."""
    HELM.require()
    from helm_python import Chart  # type: ignore[import-not-found]

    with Chart.load(CHART) as chart:
        texts = chart.render(values, name="meridian", namespace=namespace)
    return [thing for text in texts.values() for thing in objects(text)]


def by_name(things: list[Object]) -> dict[tuple[str, str], Any]:
    """Return objects by kind and name; lists of named parts of a pod have no order."""
    return {(thing["kind"], thing["metadata"]["name"]): _unordered(thing) for thing in things}


def _unordered(part: Any) -> Any:
    if isinstance(part, dict):
        return {name: _unordered(value) for name, value in part.items() if value != []}
    if isinstance(part, list) and all(isinstance(each, dict) and "name" in each for each in part):
        return {each["name"]: _unordered(each) for each in part}
    return [_unordered(each) for each in part] if isinstance(part, list) else part


@pytest.mark.parametrize("store", STORES)
def test_the_chart_and_an_overlay_are_the_same(store: str) -> None:
    from_helm, from_kustomize = by_name(helm(VALUES[store])), by_name(rendered(KUBERNETES / "overlays" / store))
    # The release chooses the namespace, so the chart does not create it.
    del from_kustomize["Namespace", "meridian"]
    assert from_helm == from_kustomize


def test_each_value_changes_what_it_names() -> None:
    values = {
        "image": {"repository": "registry/control", "tag": "9"},
        "store": "postgres",
        "replicas": 5,
        "tls": {"secret": "own-tls"},
        "access": '[[identity]]\ncn = "me"\nrole = "admin"\n',
        "postgres": {"secret": "own-postgres"},
        "resources": {"limits": {"memory": "2Gi"}},
        "networkPolicy": {"enabled": False},
        "podMonitor": {"enabled": True},
        "pageLinks": {"Grafana": "https://grafana.example/d/x?a=1&b=2", "Our runbooks": "https://wiki.example/"},
        "prometheusRule": {"enabled": True, "runbooks": "https://wiki/runbooks"},
    }
    things = helm(values, "elsewhere")
    for thing in things:
        check(thing)
        assert thing["metadata"]["namespace"] == "elsewhere"
    spec = only("StatefulSet", things)["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    assert (spec["replicas"], container["image"]) == (5, "registry/control:9")
    assert container["resources"]["limits"] == {"memory": "2Gi"}
    assert "--advertise=$(POD_NAME).meridian-control.elsewhere.svc:50051" in container["args"]
    assert container["args"][-2:] == [
        "--page-link=Grafana=https://grafana.example/d/x?a=1&b=2",
        "--page-link=Our runbooks=https://wiki.example/",
    ]
    assert {"own-tls", "own-postgres"} <= set(_texts(spec))
    assert only("ConfigMap", things)["data"]["access.toml"] == values["access"]
    assert only("PodMonitor", things)["spec"]["podMetricsEndpoints"][0]["port"] == "metrics"
    alerts = only("PrometheusRule", things)["spec"]
    for group in alerts["groups"]:
        for alert in group["rules"]:
            address, anchor = alert["annotations"].pop("runbook_url").split("#")
            assert (address, anchor) == ("https://wiki/runbooks", alert["alert"].lower())
    assert alerts == _without_runbooks(yaml.safe_load(RULES.read_text()))
    assert "NetworkPolicy" not in {thing["kind"] for thing in things}


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"store": "Postgres"}, "store must be"),
        ({"replicas": 3}, "several replicas need"),
        ({"image": {"tag": 1234567}}, "image.tag must be in quotes"),
    ],
    ids=["store", "replicas", "tag"],
)
def test_values_that_make_no_control_plane_are_refused(values: Object, why: str) -> None:
    with pytest.raises(Exception, match=why):
        helm(values)


def test_a_prometheus_in_another_namespace_may_scrape() -> None:
    *_, scraped = only("NetworkPolicy", helm({"networkPolicy": {"prometheusNamespace": "observed"}}))["spec"]["ingress"]
    assert scraped["from"][0]["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "observed"}


def test_values_of_an_earlier_chart_suffice() -> None:
    later: Object = {"networkPolicy": {"prometheusNamespace": None}, "prometheusRule": None, "pageLinks": None}
    assert helm(later) == helm({})


def test_replicas_in_another_namespace_have_their_role() -> None:
    access = tomllib.loads(only("ConfigMap", helm({}, "elsewhere"))["data"]["access.toml"])
    assert {"dns": "meridian-control.elsewhere.svc", "role": "operator"} in access["identity"]


def _without_runbooks(part: Any) -> Any:
    if isinstance(part, dict):
        return {name: _without_runbooks(value) for name, value in part.items() if name != "runbook_url"}
    return [_without_runbooks(each) for each in part] if isinstance(part, list) else part


def _texts(part: Any) -> list[str]:
    if isinstance(part, dict | list):
        return [text for each in (part.values() if isinstance(part, dict) else part) for text in _texts(each)]
    return [part] if isinstance(part, str) else []
