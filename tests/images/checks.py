"""Checks of running containers. Each function yields a description of a check after the check has passed, and raises
AssertionError or TimeoutError otherwise."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import yaml

from deploy.generate import HERE
from tests.data import maze
from tests.images.pods import Pod
from tests.processes import MODEL, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.images.pods import Container
    from tests.images.site import Site

CAP = 12
POLICY = f"[scheduler]\nmax_think_tokens = {CAP}\nmin_think_tokens = 0\n"
OPTIONS = ["--model=/model", "--served-model-name=maze", "--reasoning-parser=qwen3", "--enforce-eager"]
OPTIONS += ["--dtype=float32", "--block-size=32", "--max-model-len=1024", "--max-num-seqs=2", "--host=127.0.0.1"]
ENGINE_ENV = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "HOME": "/root"}
ASK = """
import json, sys, urllib.request as r
body = {"model": "maze", "messages": [{"role": "user", "content": sys.argv[1]}], "temperature": 0, "max_tokens": 200}
head = {"Content-Type": "application/json"}
request = r.Request("http://127.0.0.1:8000/v1/chat/completions", json.dumps(body).encode(), head)
print(json.load(r.urlopen(request, timeout=300))["choices"][0]["message"]["content"])
"""


def control(site: Site) -> Iterator[str]:
    """Check the control plane's container, and leave it running with a policy that caps thinking."""
    running = site.start()
    yield "answers health checks on the port of the manifest's probes"
    yield from _confined(site, running)
    before = in_force(site)
    yield "serves metrics"
    revision = apply(site)
    assert in_force(site) == revision > before
    yield "takes a policy from an operator outside"
    refused = site.meridianctl("policy", "apply", "--file", str(site.folder / "policy.toml"), who=site.agent)
    assert refused.returncode == 4, refused
    yield "refuses a policy from a client that has an engine's certificate"
    assert running.stop(site.store.config(site.image)["StopSignal"]) == 0, running.process.output()[-2000:]
    assert "draining the streams" in running.process.output()
    yield "drains its streams and ends at the stop signal"
    site.start()
    assert in_force(site) == revision
    yield "has its policy after a restart with the same volume"


def _confined(site: Site, running: Container) -> Iterator[str]:
    status = running.status()
    assert set(status["Uid"].split()) == set(status["Gid"].split()) == {"10001"}, status
    assert (int(status["CapBnd"], 16), int(status["CapEff"], 16), status["NoNewPrivs"]) == (0, 0, "1"), status
    yield "runs as user 10001 without capabilities and cannot gain any"
    refused = running.execute("touch", "/opt/meridian/probe")
    assert "Read-only file system" in refused.stderr, refused
    written = running.execute("touch", "/var/lib/meridian/probe")
    assert written.returncode == 0, written
    yield "writes to its volume only"


def in_force(site: Site) -> int:
    """Return the revision of the policy in force from the metrics."""
    (line,) = [line for line in site.metrics().splitlines() if line.startswith("meridian_policy_revision ")]
    return int(float(line.split()[1]))


def apply(site: Site) -> int:
    """Put the policy in force with meridianctl, and return its revision."""
    file = site.folder / "policy.toml"
    file.write_text(POLICY)
    done = site.meridianctl("policy", "apply", "--file", str(file), "--author", "test")
    assert done.returncode == 0, done
    return int(json.loads(site.meridianctl("policy", "history", "--output", "json").stdout)[0]["revision"])


def init(site: Site, image: str, pod: Pod) -> Iterator[str]:
    """Check the init container of an engine's pod."""
    copied = site.run(Pod(f"{pod.name}-init", pod.spec, pod.spec["initContainers"][0], pod.volumes), image)
    wait_for(lambda: copied.process.popen.poll() is not None, 60, "the agent to be copied")
    assert copied.process.kill() == 0, copied.process.output()
    assert (pod.volumes["meridian"] / "meridian_agent" / "plugin.py").stat().st_uid == 10001
    yield "copies the agent into the volume as user 10001"


def engine(site: Site, image: str, pod: Pod) -> Iterator[str]:
    """Check an engine's container beside the control plane's, which has a policy in force that caps thinking."""
    running = site.run(pod, image)
    revision = int(json.loads(site.meridianctl("policy", "history", "--output", "json").stdout)[0]["revision"])

    def governed() -> bool:
        assert running.process.popen.poll() is None, running.process.output()[-3000:]
        found = engines(site).get(pod.name, {})
        return bool(found.get("acked_revision") == str(revision) and found.get("state") == "CONNECTION_STATE_CONNECTED")

    wait_for(governed, 300, "the engine to take the policy")
    yield "connects over mTLS and takes the policy"
    healthy = "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health')"
    wait_for(lambda: site.network.run(sys.executable, "-c", healthy).returncode == 0, 120, "the server to be healthy")
    answered = ask(site)
    assert " ".join(maze.ANSWER_WORDS[:2]) in answered, answered
    wait_for(lambda: list(engines(site)[pod.name]["ends"]) == ["hard_cap"], 60, "the thinking to end at the cap")
    yield f"ends thinking after {CAP} tokens, as the policy says, and answers"
    assert site.control is not None
    assert site.control.stop("SIGTERM") == 0
    assert " ".join(maze.ANSWER_WORDS[:2]) in ask(site)
    yield "answers while the control plane is down"
    site.start()
    wait_for(governed, 60, "the engine to connect again")
    yield "connects again after the control plane's restart"
    running.stop("SIGTERM")


def engine_pod(site: Site, with_init: bool) -> Pod:
    """Return the pod of the example with the test model, its volumes on this machine, and no GPU.

    with_init: the agent is in the volume that the init container fills, otherwise in vLLM's image.
    """
    example = yaml.safe_load((HERE / "kubernetes" / "examples" / "deployment.yaml").read_text())
    spec = example["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    container["args"] = OPTIONS
    env = [v for v in container["env"] if with_init or v["name"] != "PYTHONPATH"]
    container["env"] = env + [{"name": name, "value": value} for name, value in ENGINE_ENV.items()]
    container["volumeMounts"].append({"name": "model", "mountPath": "/model", "readOnly": True})
    name = f"vllm-{'init' if with_init else 'layer'}"
    folder = site.folder / name
    volumes = {each: folder / each for each in ("meridian", "shm", "meridian-tls")}
    for volume in volumes.values():
        volume.mkdir(parents=True)
        volume.chmod(0o777)
    site.secret(site.agent, volumes["meridian-tls"])
    return Pod(name, spec, container, {**volumes, "model": MODEL})


def engines(site: Site) -> dict[str, dict[str, Any]]:
    """Return the control plane's engines by name, as meridianctl prints them."""
    found = json.loads(site.meridianctl("engines", "--output", "json").stdout or "[]")
    return {each["engine_id"]: each for each in found}


def ask(site: Site) -> str:
    """Send a chat request to the engine and return its answer."""
    done = site.network.run(sys.executable, "-c", ASK, maze.prompts(1, seed=11)[0])
    assert done.returncode == 0, done.stderr
    return done.stdout
