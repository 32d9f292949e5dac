"""Runs containers of images as a manifest describes them, with runc and without a cluster.

`runtime_spec` does what a kubelet does with a pod: it combines the image's configuration with the manifest. The pod has
the user, the groups, the read-only root, the capabilities, the memory limit and the mounts of the manifest. The
seccomp profile is not applied, and all pods share one network, in which nothing else runs but `Network.run`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.processes import Process, wait_for

if TYPE_CHECKING:
    from collections.abc import Mapping

    Object = dict[str, Any]

# The capabilities of a container that keeps those of its user, as far as vLLM's image may use them.
CAPABILITIES = ["CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_SETGID", "CAP_SETUID"]
UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
# Sets the loopback device up, says so, and waits until its input ends.
LOOPBACK = """
import fcntl, socket, struct, sys
fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sH14x", b"lo", 0x1))
print("up", flush=True)
sys.stdin.read()
"""
# The file systems that every container has.
OWN_MOUNTS: list[Object] = [
    {"destination": "/proc", "type": "proc", "source": "proc"},
    {"destination": "/sys", "type": "bind", "source": "/sys", "options": ["rbind", "ro"]},
    {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755", "size=65536k"]},
    {"destination": "/dev/pts", "type": "devpts", "source": "devpts", "options": ["nosuid", "noexec", "newinstance"]},
    {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": ["nosuid", "nodev", "mode=1777"]},
]


@dataclass(frozen=True)
class Pod:
    """A container of a pod and its surroundings.

    name: the pod's name. spec: the manifest's pod. container: the manifest's container. volumes: the folder on this
    machine for each volume.
    """

    name: str
    spec: Object
    container: Object
    volumes: Mapping[str, Path]

    @property
    def security(self) -> Object:
        """Return the security context of the container, with the pod's."""
        return {**self.spec.get("securityContext", {}), **self.container.get("securityContext", {})}

    def variables(self) -> dict[str, str]:
        """Return the variables of the manifest. A reference to the pod's name is the only one that is resolved."""
        values = {}
        for variable in self.container.get("env", ()):
            value = variable.get("value")
            if value is None and variable["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}:
                value = self.name
            if value is not None:
                values[variable["name"]] = value
        return values


def runtime_spec(pod: Pod, image: Object, root: Path, network: Network) -> Object:
    """Return the OCI runtime's configuration of a container in a pod.

    image: the image's configuration. root: the container's root file system.
    """
    security = pod.security
    user, _, group = (image.get("User") or "0:0").partition(":")
    variables = dict(line.split("=", 1) for line in image.get("Env", ())) | pod.variables()
    limit = pod.container.get("resources", {}).get("limits", {}).get("memory")
    entry, given = pod.container.get("command"), pod.container.get("args")
    default = [] if entry else image.get("Cmd") or []
    kept = [] if "ALL" in security.get("capabilities", {}).get("drop", ()) else CAPABILITIES
    return {
        "ociVersion": "1.0.2",
        "hostname": pod.name,
        "root": {"path": str(root), "readonly": bool(security.get("readOnlyRootFilesystem"))},
        "process": {
            "user": {
                "uid": security.get("runAsUser", int(user)),
                "gid": security.get("runAsGroup", int(group or 0)),
                "additionalGids": [security["fsGroup"]] if "fsGroup" in security else [],
            },
            "args": [*(entry or image.get("Entrypoint") or []), *(default if given is None else given)],
            "env": [f"{name}={value}" for name, value in variables.items()],
            "cwd": image.get("WorkingDir") or "/",
            "noNewPrivileges": security.get("allowPrivilegeEscalation") is False,
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), kept),
        },
        "mounts": [*OWN_MOUNTS, bind(network.hosts, "/etc/hosts", "ro"), *_volumes(pod)],
        "linux": {
            "namespaces": [
                *({"type": name} for name in ("pid", "ipc", "uts", "mount")),
                {"type": "network", "path": network.path},
            ],
            "resources": {"memory": {"limit": int(limit[:-2]) * UNITS[limit[-2:]]}} if limit else {},
        },
    }


def _volumes(pod: Pod) -> list[Object]:
    return [
        bind(pod.volumes[mount["name"]], mount["mountPath"], "ro" if mount.get("readOnly") else "rw")
        for mount in pod.container.get("volumeMounts", ())
    ]


def bind(source: Path, destination: str, mode: str) -> Object:
    return {"destination": destination, "type": "bind", "source": str(source), "options": ["rbind", mode]}


class Network:
    """A network namespace with a loopback device, in which `names` are names of this machine."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.hosts = folder / "hosts"
        self.hosts.write_text(f"127.0.0.1 {' '.join(names)} localhost\n")
        command = ["unshare", "--net", sys.executable, "-c", LOOPBACK]
        self._holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline()

    @property
    def path(self) -> str:
        return f"/proc/{self._holder.pid}/ns/net"

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a program of this machine in the network."""
        return subprocess.run(["nsenter", f"--net={self.path}", *command], capture_output=True, text=True, check=False)

    def stop(self) -> None:
        self._holder.communicate()


class Container:
    """A container that runc runs. `folder` is the container's own and holds its bundle, its state and its log."""

    def __init__(self, folder: Path, name: str, spec: Object) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(spec))
        # The id is also the name of a control group, so each process that runs containers has ids of its own.
        self.name, self._state = f"{name}-{os.getpid()}", str(folder / "runc")
        self.process = Process(self._runc("run", "--bundle", str(folder), self.name), folder / "log")

    def _runc(self, *arguments: str) -> list[str]:
        return ["runc", "--root", self._state, *arguments]

    def execute(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the container."""
        return subprocess.run(self._runc("exec", self.name, *command), capture_output=True, text=True, check=False)

    def status(self) -> dict[str, str]:
        """Return what the kernel says of the container's first process, by field."""
        state = subprocess.run(self._runc("state", self.name), capture_output=True, text=True, check=True)
        text = Path(f"/proc/{json.loads(state.stdout)['pid']}/status").read_text()
        return {name: value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}

    def stop(self, signal: str) -> int:
        """Send the image's stop signal and return the exit status."""
        subprocess.run(self._runc("kill", self.name, signal), check=True)
        wait_for(lambda: self.process.popen.poll() is not None, 30, f"{self.name} to end")
        return self.process.kill()

    def remove(self) -> None:
        """End the container if it runs, and remove its state."""
        subprocess.run(self._runc("delete", "--force", self.name), capture_output=True, check=False)
        self.process.kill()


def give(folder: Path, pod: Pod) -> Path:
    """Give a volume to the pod's group, as a kubelet does with `fsGroup`, and return it."""
    for path in (folder, *folder.rglob("*")):
        os.chown(path, -1, pod.spec["securityContext"]["fsGroup"])
        path.chmod(path.stat().st_mode | (0o2070 if path.is_dir() else 0o060))
    return folder
