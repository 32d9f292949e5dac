"""A control plane and engines in containers, as the overlay `sqlite` and the example `deployment.yaml` describe them.

Certificates have the names that the addon cert-manager gives them. The programs that call the control plane run on this
machine, outside of the containers.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from typing import TYPE_CHECKING, Any

from deploy.generate import HERE
from tests.certificates import Authority
from tests.deploy.rendering import only, rendered
from tests.images.pods import Container, Network, Pod, give, runtime_spec
from tests.processes import MERIDIANCTL, wait_for

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

    from tests.certificates import Issued
    from tests.images.store import Store

SERVICE = "meridian-control.meridian.svc"
HEALTH = """
import sys, grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
with grpc.insecure_channel(sys.argv[1]) as channel:
    print(health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5).status)
"""


class Site:
    """The pods' volumes, certificates and network in `folder`, and the control plane's container while it runs."""

    def __init__(self, store: Store, folder: Path, image: str) -> None:
        self.store, self.folder, self.image = store, folder, image
        self._ending = contextlib.ExitStack()
        folder.mkdir()
        self.network = Network(folder, SERVICE)
        self._ending.callback(self.network.stop)
        authority = Authority(folder)
        server = authority.issue("server", dns=SERVICE)
        self.agent = authority.issue("agent", uri="spiffe://meridian/agent")
        self.operator = authority.issue("operator", uri="spiffe://meridian/operator")
        spec = only("StatefulSet", rendered(HERE / "kubernetes" / "overlays" / "sqlite"))["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        volumes = {name: folder / name for name in ("store", "tls", "access")}
        for volume in volumes.values():
            volume.mkdir()
        self.secret(server, volumes["tls"])
        shutil.copy(HERE / "kubernetes" / "tls" / "access.toml", volumes["access"])
        self.pod = Pod("meridian-control-0", spec, container, volumes)
        for volume in volumes.values():
            give(volume, self.pod)
        self.control: Container | None = None

    def start(self) -> Container:
        """Start the control plane's container, and wait until the pod would be ready."""
        self.control = self.run(self.pod, self.image)
        wait_for(lambda: self.health() == "1", 30, "the control plane to be healthy")
        return self.control

    def run(self, pod: Pod, image: str) -> Container:
        """Start a container that ends with the site at the latest."""
        _, root = self._ending.enter_context(self.store.container(image))
        spec = runtime_spec(pod, self.store.config(image), root, self.network)
        container = Container(self.folder / "containers" / pod.name, pod.name, spec)
        self._ending.callback(container.remove)
        return container

    def health(self) -> str:
        """Ask for the control plane's health, as a kubelet does; return the status, or an empty string."""
        port = self.pod.container["readinessProbe"]["grpc"]["port"]
        return self.network.run(sys.executable, "-c", HEALTH, f"127.0.0.1:{port}").stdout.strip()

    def metrics(self) -> str:
        (port,) = (port["containerPort"] for port in self.pod.container["ports"] if port["name"] == "metrics")
        code = f"import urllib.request as r; print(r.urlopen('http://127.0.0.1:{port}/metrics').read().decode())"
        return self.network.run(sys.executable, "-c", code).stdout

    def meridianctl(self, *arguments: str, who: Any = None) -> subprocess.CompletedProcess[str]:
        """Run meridianctl outside of the containers, by default with the operator's certificate."""
        issued = who or self.operator
        credentials = ["--ca", str(issued.ca), "--cert", str(issued.cert), "--key", str(issued.key)]
        return self.network.run(*MERIDIANCTL, "--server", "127.0.0.1:50051", *credentials, *arguments)

    def secret(self, issued: Issued, folder: Path) -> None:
        """Fill a secret's folder with a certificate."""
        for name, file in (("tls.crt", issued.cert), ("tls.key", issued.key), ("ca.crt", issued.ca)):
            shutil.copy(file, folder / name)

    def close(self) -> None:
        """End all containers and remove the files."""
        self._ending.close()
        shutil.rmtree(self.folder)
