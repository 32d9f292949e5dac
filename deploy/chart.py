"""Makes the Helm chart from the Kustomize files, so that both describe the same objects.

The base gives the objects, and the overlays give the parts that depend on a value of the chart. `tests/deploy` renders
the chart and each overlay and compares them.

A string that begins with `@` stands for a template: `@if C` and `@end` enclose items of a list or keys of a mapping,
`@range V` and `@end` items that are repeated, `@= E` prints an expression, and `@yaml E` prints an expression as a
block of YAML.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    Object = dict[str, Any]

HERE = Path(__file__).parent
KUBERNETES = HERE / "kubernetes"
CHART = HERE / "helm" / "meridian"
NAMESPACE = "meridian"
STORES = ("trial", "sqlite", "postgres")
# The template of the StatefulSet fails under each of these conditions on the values, with the text beside it.
REFUSED = {
    'not (has .Values.store (list "trial" "sqlite" "postgres"))': "store must be trial, sqlite or postgres",
    'and (ne .Values.store "postgres") (gt (int .Values.replicas) 1)': "several replicas need the store postgres",
    'not (kindIs "string" .Values.image.tag)': "image.tag must be in quotes, or given by --set-string",
}
TLS, POSTGRES = ".Values.tls.enabled", 'eq .Values.store "postgres"'
NOTICE = "# deploy/chart.py generates this file from the Kustomize files.\n"
# Text of the templates that names the namespace, which a release chooses.
PLACES = {f"namespace: {NAMESPACE}\n": "namespace: {{ .Release.Namespace }}\n"}
PLACES[f".{NAMESPACE}.svc"] = ".{{ .Release.Namespace }}.svc"
MARK = re.compile(r"^ *(?:- )?'?@((?:if|range) [^\n]*?|end)(?: #\d+)?'?(?:: null)?$", re.MULTILINE)
PRINTED = re.compile(r"'@= ([^\n]*)'$", re.MULTILINE)
BLOCK = re.compile(r"^( *)([\w.]+): '@yaml ([^\n]*)'$", re.MULTILINE)


def chart(rule: Object, runbooks: str) -> dict[Path, str]:
    """Return the content of each of the chart's files by its path. rule: the PrometheusRule. runbooks: address of the
    alerts' runbooks."""
    values = _values() | {"prometheusRule": {"enabled": False, "runbooks": runbooks}}
    described = {
        "apiVersion": "v2",
        "name": "meridian",
        "description": "Control plane for reasoning models on vLLM",
        "type": "application",
        "version": values["image"]["tag"],
        "appVersion": values["image"]["tag"],
    }
    templates = {
        "serviceaccount": _base("serviceaccount"),
        "service": _base("service"),
        "statefulset": _stateful_set(),
        "networkpolicy": _network_policy(),
        "poddisruptionbudget": _only_if(POSTGRES, _read("overlays/postgres/poddisruptionbudget.yaml")),
        "access": _access(),
        "podmonitor": _only_if(".Values.podMonitor.enabled", _pod_monitor()),
        "prometheusrule": _only_if("(.Values.prometheusRule).enabled", _prometheus_rule(rule)),
    }
    files = {CHART / "templates" / f"{name}.yaml": NOTICE + template(made) for name, made in templates.items()}
    checks = [f'{{{{- if {wrong} }}}}{{{{ fail "{why}" }}}}{{{{- end }}}}\n' for wrong, why in REFUSED.items()]
    files[CHART / "templates" / "statefulset.yaml"] += "".join(checks)
    files[CHART / "Chart.yaml"] = NOTICE + _dump(described)
    files[CHART / "values.yaml"] = NOTICE + _dump(values)
    return files


def template(made: Object) -> str:
    """Return an object that contains marks as the text of a template."""
    text = _dump(made)
    text = BLOCK.sub(lambda m: f"{m[1]}{m[2]}:\n{m[1]}  {{{{- toYaml {m[3]} | nindent {len(m[1]) + 2} }}}}", text)
    text = PRINTED.sub(lambda m: "{{ " + m[1].replace("''", "'") + " }}", text)
    text = MARK.sub(lambda m: "{{- " + m[1] + " }}", text)
    return _placed(text)


def _placed(text: str) -> str:
    """Return the text with the release's namespace in place of Kustomize's."""
    for place, replaced in PLACES.items():
        text = text.replace(place, replaced)
    return text


def _values() -> Object:
    """Return the default values: the overlay `sqlite`, whose limits the base gives."""
    (container,) = _read("base/statefulset.yaml")["spec"]["template"]["spec"]["containers"]
    (image,) = _read("base/kustomization.yaml")["images"]
    return {
        "image": {"repository": image["name"], "tag": image["newTag"]},
        "store": "sqlite",
        "replicas": 1,
        "tls": {"enabled": True, "secret": "meridian-tls"},
        "access": _placed((KUBERNETES / "tls" / "access.toml").read_text(encoding="utf-8")),
        "postgres": {"secret": "meridian-postgres"},
        "resources": container["resources"],
        "networkPolicy": {"enabled": True, "prometheusNamespace": "monitoring"},
        "podMonitor": {"enabled": False},
        "pageLinks": {},
    }


def _stateful_set() -> Object:
    made = _base("statefulset")
    made["spec"]["replicas"] = "@= .Values.replicas"
    pod = made["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    container["image"] = '@= printf "%s:%s" .Values.image.repository .Values.image.tag'
    container["resources"] = "@yaml .Values.resources"
    container["args"] += _when(TLS, [patch["value"] for patch in _read("tls/args.yaml")])
    container["args"] += _when(POSTGRES, [patch["value"] for patch in _read("overlays/postgres/args.yaml")])
    link = '@= printf "--page-link=%s=%s" $name $url | quote'
    container["args"] += ["@range $name, $url := .Values.pageLinks", link, "@end"]
    tls = _pod(_read("tls/tls.yaml"))
    tls["volumes"][0]["secret"]["secretName"] = "@= .Values.tls.secret"
    stores = {name: _pod(_read(f"overlays/{name}/store.yaml")) for name in STORES}
    parts = [(TLS, tls), *((f'eq .Values.store "{name}"', store) for name, store in stores.items())]
    for variable in stores["postgres"]["containers"][0]["env"]:
        if "secretKeyRef" in variable["valueFrom"]:
            variable["valueFrom"]["secretKeyRef"]["name"] = "@= .Values.postgres.secret"
    for condition, part in parts:
        for field in ("env", "volumeMounts"):
            container.setdefault(field, []).extend(_when(condition, part["containers"][0].get(field, [])))
        pod.setdefault("volumes", []).extend(_when(condition, part.get("volumes", [])))
    spread = {name: part for name, part in stores["postgres"].items() if name == "topologySpreadConstraints"}
    pod.update(_keys(POSTGRES, spread, 1))
    claims = _read("overlays/sqlite/store.yaml")["spec"]["volumeClaimTemplates"]
    made["spec"].update(_keys('eq .Values.store "sqlite"', {"volumeClaimTemplates": claims}, 2))
    return made


def _network_policy() -> Object:
    made = _base("networkpolicy")
    *_, scraped = made["spec"]["ingress"]
    labels = scraped["from"][0]["namespaceSelector"]["matchLabels"]
    ((name, default),) = labels.items()
    # `helm upgrade --reuse-values` brings the values of an earlier chart, which has fewer.
    labels[name] = f'@= .Values.networkPolicy.prometheusNamespace | default "{default}"'
    made["spec"].update(_keys(POSTGRES, {"egress": _read("overlays/postgres/networkpolicy.yaml")["spec"]["egress"]}, 1))
    return _only_if(".Values.networkPolicy.enabled", made)


def _access() -> Object:
    made = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "meridian-access", "namespace": NAMESPACE},
        "data": {"access.toml": "@= tpl .Values.access . | toJson"},
    }
    return _only_if(TLS, made)


def _pod_monitor() -> Object:
    """Return the addon's ServiceMonitor as a PodMonitor, which scrapes the pods' port itself."""
    made: Object = _read("addons/monitoring/servicemonitor.yaml")
    made["kind"] = "PodMonitor"
    made["spec"]["podMetricsEndpoints"] = made["spec"].pop("endpoints")
    return made


def _prometheus_rule(rule: Object) -> Object:
    """Return the PrometheusRule with runbooks at the address that a value gives; Prometheus fills in the braces of the
    other annotations."""
    made = copy.deepcopy(rule)
    for alert in (alert for group in made["spec"]["groups"] for alert in group["rules"]):
        texts = alert["annotations"]
        anchor = texts.pop("runbook_url").partition("#")[2]
        texts |= {name: text.replace("{{", '{{ "{{" }}') for name, text in texts.items()}
        texts["runbook_url"] = f'@= printf "%s#{anchor}" .Values.prometheusRule.runbooks'
    return made


def _base(name: str) -> Object:
    """Return an object of the base, with the namespace that Kustomize gives it."""
    made: Object = _read(f"base/{name}.yaml")
    made["metadata"]["namespace"] = NAMESPACE
    return made


def _only_if(condition: str, made: Object) -> Object:
    made["metadata"]["namespace"] = NAMESPACE
    return _keys(condition, made, 0)


def _when(condition: str, items: list[Any]) -> list[Any]:
    return [f"@if {condition}", *items, "@end"] if items else []


def _keys(condition: str, keys: Object, number: int) -> Object:
    """Enclose keys of a mapping; the number makes the marks' own keys different from others in the mapping."""
    return {f"@if {condition} #{number}": None, **keys, f"@end #{number}": None}


def _pod(patch: Object) -> Object:
    pod: Object = patch["spec"]["template"]["spec"]
    return pod


def _read(name: str) -> Any:
    return yaml.safe_load((KUBERNETES / name).read_text(encoding="utf-8"))


class _Dumper(yaml.SafeDumper):
    """A dumper that writes texts of several lines as blocks, and no references."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else "'" if text.startswith("@") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _text)


def _dump(made: Object) -> str:
    return yaml.dump(made, Dumper=_Dumper, sort_keys=False, width=1000)
