"""Check each manifest against Kubernetes' schemas, and check the output of Kustomize for overlays and addons.

Rendering needs kubectl 1.20 or newer (Debian 12 has it) or kustomize, and is skipped without one; the schemas are
always checked.
"""

from __future__ import annotations

import functools
import importlib
import os
from typing import TYPE_CHECKING, Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml
from packaging.version import Version

from deploy.generate import ADDONS, HERE
from meridian_control.app.flags import parser
from meridian_control.server.roles import Identities
from tests.deploy.rendering import objects, only, rendered

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    Object = dict[str, Any]

KUBERNETES = HERE / "kubernetes"
# Otherwise each object reads megabytes of definitions anew.
kubernetes_validate.utils.schema_contents = functools.cache(kubernetes_validate.utils.schema_contents)
# An old release, and the newest.
NEWEST = max(Version(known).release[:2] for known in kubernetes_validate.utils.all_versions())
VERSIONS = ("1.30", "{}.{}".format(*NEWEST))
# Schemas of resources that Kubernetes itself does not know. KServe's services have none.
MODELS = {
    "cert-manager.io/v1": "cloudcoil.models.cert_manager.v1",
    "keda.sh/v1alpha1": "cloudcoil.models.keda.v1alpha1",
    "monitoring.coreos.com/v1": "cloudcoil.models.prometheus_operator.v1",
}
# Files of programs other than Kubernetes' API server, and resources without a schema.
OTHERS = {
    *("endpoint-picker.yaml", "kserve.yaml", "kustomization.yaml"),
    *("production-stack.yaml", "prometheus-adapter.yaml"),
}
PATCHES = {"store.yaml", "tls.yaml", "args.yaml"}
OVERLAYS = ("trial", "sqlite", "postgres")
# Fields that Kustomize 2, which is in Debian 12's kubectl, and later versions read.
FIELDS = {
    *("apiVersion", "kind", "namespace", "bases", "resources", "images"),
    *("generatorOptions", "configMapGenerator", "patchesStrategicMerge", "patchesJson6902"),
}
SERVERS = ("Deployment", "StatefulSet")


def whole_files() -> Iterator[Path]:
    for path in sorted(KUBERNETES.rglob("*.yaml")):
        patch = path.name in PATCHES or path.parts[-3:] == ("overlays", "postgres", "networkpolicy.yaml")
        if path.name not in OTHERS and not patch:
            yield path


def check(thing: Object) -> None:
    """Check an object. Raises ValidationError or AssertionError if the API server would refuse it, e.g. for an unknown
    field."""
    if (module := MODELS.get(thing["apiVersion"])) is not None:
        model = getattr(importlib.import_module(module), thing["kind"])
        read = model.model_validate(thing).model_dump(by_alias=True, exclude_unset=True, mode="json")
        assert read == thing, "a field is unknown or misspelt"
        return
    for version in VERSIONS:
        kubernetes_validate.validate(thing, version, strict=True)


@pytest.mark.parametrize("path", list(whole_files()), ids=lambda p: str(p.relative_to(KUBERNETES)))
def test_a_file_fits_the_schemas(path: Path) -> None:
    for thing in objects(path.read_text()):
        check(thing)


def test_pods_in_the_examples_of_others_resources_fit_the_schemas() -> None:
    """KServe's and the production stack's own fields have no schema here, but the pods in them are Kubernetes' own."""
    predictor = yaml.safe_load((KUBERNETES / "examples/kserve.yaml").read_text())["spec"]["predictor"]
    values = yaml.safe_load((KUBERNETES / "examples/production-stack.yaml").read_text())["servingEngineSpec"]
    (model,) = values["modelSpec"]
    container = {"name": "vllm", "image": "vllm", "env": model["env"], "volumeMounts": model["extraVolumeMounts"]}
    for labels, spec in (
        (predictor["labels"], {name: part for name, part in predictor.items() if name != "labels"}),
        (values["labels"], {"containers": [container], "volumes": model["extraVolumes"]}),
    ):
        check({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a", "labels": labels}, "spec": spec})
        mounted = {mount["name"] for of in spec["containers"] for mount in of["volumeMounts"]}
        assert mounted <= {volume["name"] for volume in spec["volumes"]}


@pytest.mark.parametrize(
    "thing",
    [
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a"}, "spec": {"port": 1}},
        {"apiVersion": "cert-manager.io/v1", "kind": "Issuer", "metadata": {"name": "a"}, "spec": {"selfsigned": {}}},
    ],
    ids=["core", "custom"],
)
def test_a_wrong_field_is_found(thing: Object) -> None:
    with pytest.raises((kubernetes_validate.ValidationError, AssertionError)):
        check(thing)


@pytest.mark.parametrize("path", sorted(KUBERNETES.rglob("kustomization.yaml")), ids=lambda p: p.parent.name)
def test_a_kustomization_names_what_is_there_in_words_that_old_ones_know(path: Path) -> None:
    content = yaml.safe_load(path.read_text())
    assert set(content) <= FIELDS
    assert all(set(generator) == {"name", "files"} for generator in content.get("configMapGenerator", ()))
    named = [name for field in ("bases", "resources", "patchesStrategicMerge") for name in content.get(field, ())]
    named += [patch["path"] for patch in content.get("patchesJson6902", ())]
    named += [name for generator in content.get("configMapGenerator", ()) for name in generator["files"]]
    assert named
    for name in named:
        assert (path.parent / name).exists(), name
    # Kustomize 2 takes folders only from `bases`, and files only from `resources`.
    assert all((path.parent / name).is_dir() for name in content.get("bases", ()))
    assert all((path.parent / name).is_file() for name in content.get("resources", ()))


@pytest.mark.parametrize("name", OVERLAYS)
def test_an_overlay(name: str) -> None:
    things = rendered(KUBERNETES / "overlays" / name)
    for thing in things:
        check(thing)
    pod = only("StatefulSet", things)["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    # The control plane accepts the arguments with which it is started.
    args = parser().parse_args(container["args"])
    probes = {container[f"{kind}Probe"]["grpc"]["port"] for kind in ("startup", "readiness", "liveness")}
    assert probes == {int(args.health_listen.removeprefix(":"))}
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert args.listen == f":{ports['grpc']}"
    assert args.metrics_listen == f":{ports['metrics']}"
    assert container["securityContext"]["readOnlyRootFilesystem"]
    mounted = {mount["name"] for mount in container.get("volumeMounts", ())}
    claims = only("StatefulSet", things)["spec"].get("volumeClaimTemplates", ())
    assert mounted == {volume["name"] for volume in pod.get("volumes", ())} | {c["metadata"]["name"] for c in claims}
    service = only("Service", things)["spec"]
    assert service["clusterIP"] == "None"
    assert service["selector"].items() <= only("StatefulSet", things)["spec"]["template"]["metadata"]["labels"].items()
    policy = only("NetworkPolicy", things)["spec"]
    assert policy["podSelector"]["matchLabels"] == service["selector"]
    assert policy["ingress"][0]["from"][0]["podSelector"]["matchLabels"] == {"meridian/agent": "true"}


@pytest.mark.parametrize("name", ["cert-manager", "monitoring", "dashboards"])
def test_an_addon_alone_and_beside_an_overlay(name: str, tmp_path: Path) -> None:
    added = rendered(ADDONS / name)
    for thing in added:
        check(thing)
        assert thing["metadata"]["namespace"] == "meridian"
    here = os.path.relpath(KUBERNETES, tmp_path.resolve())
    images = [{"name": "meridian-control", "newName": "registry/meridian-control"}]
    content = {"bases": [f"{here}/overlays/postgres", f"{here}/addons/{name}"], "images": images}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(content))
    things = rendered(tmp_path)
    assert {_name(thing) for thing in things} >= {_name(thing) for thing in added}
    (container,) = only("StatefulSet", things)["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "registry/meridian-control:0.3.0"


def _name(thing: Object) -> tuple[str, str]:
    return thing["kind"], thing["metadata"]["name"]


def test_the_secret_that_overlays_want_is_what_cert_manager_makes() -> None:
    certificates = objects((ADDONS / "cert-manager/certificates.yaml").read_text())
    wanted = objects((KUBERNETES / "tls/tls.yaml").read_text())[0]["spec"]["template"]["spec"]["volumes"]
    secrets = {volume["secret"]["secretName"] for volume in wanted if "secret" in volume}
    assert secrets <= {certificate["spec"]["secretName"] for certificate in certificates}


def test_the_access_file_gives_each_certificate_its_role() -> None:
    identities = Identities(KUBERNETES / "tls/access.toml")
    certificates = objects((ADDONS / "cert-manager/certificates.yaml").read_text())
    roles = {}
    for certificate in certificates:
        spec = certificate["spec"]
        names = [("uri", name) for name in spec.get("uris", ())] + [("dns", name) for name in spec.get("dnsNames", ())]
        roles[spec["secretName"]] = identities.of_certificate(names)
    assert {name: who.role.name for name, who in roles.items()} == {
        "meridian-tls": "OPERATOR",
        "meridian-agent-tls": "AGENT",
        "meridian-operator-tls": "OPERATOR",
    }
    roles["meridian-agent-tls"].check_engine("vllm-0")


def test_engines_and_control_plane_speak_of_the_same_things() -> None:
    service = only("Service", objects((KUBERNETES / "base/service.yaml").read_text()))
    namespace = yaml.safe_load((KUBERNETES / "base/kustomization.yaml").read_text())["namespace"]
    grpc = next(port["port"] for port in service["spec"]["ports"] if port["name"] == "grpc")
    address = f"{service['metadata']['name']}.{namespace}.svc:{grpc}"
    certificates = objects((ADDONS / "cert-manager/certificates.yaml").read_text())
    assert address.partition(":")[0] in certificates[0]["spec"]["dnsNames"]
    secrets = {certificate["spec"]["secretName"] for certificate in certificates}
    for example in sorted((KUBERNETES / "examples").glob("*.yaml")):
        text = example.read_text()
        assert f"value: {address}\n" in text, example.name
        assert 'meridian/agent: "true"' in text, example.name
        assert text.count("- --shutdown-timeout=20\n") == text.count("- --reasoning-parser=") > 0, example.name
        assert "secretName: meridian-agent-tls" in text
        pods = [each["spec"]["template"]["spec"] for each in objects(text) if each.get("kind") in SERVERS]
        assert all("readinessProbe" in container for pod in pods for container in pod["containers"]), example.name
    assert "meridian-agent-tls" in secrets
