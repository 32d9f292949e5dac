"""Compile the CUDA source with NVRTC, CuPy's compiler, for GPUs that this machine need not have.

The module also reads the compiler's report on registers, shared memory and spills; `python -m tests.nvrtc` prints the
table of kernels/cuda_kernel.md.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import re
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from meridian_kernels.cuda import OPTIONS, SOURCE

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
# Options that CuPy adds by itself.
CUPYS = ("-ftz=true", "--device-as-default-execution-space")
# Distributions that contain NVRTC; the first one is in the extra `dev`.
WHEELS = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")


@dataclass(frozen=True)
class Resources:
    """The resources of one kernel on one architecture."""

    kernel: str
    architecture: str
    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_bytes: int


class Compiler:
    """The NVRTC library. Raises OSError if it is not installed."""

    def __init__(self) -> None:
        self._lib = ctypes.CDLL(library())
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = f"{major.value}.{minor.value}"

    def compile(self, architecture: str, *options: str) -> tuple[bytes, str]:
        """Return machine code for this architecture, and the compiler's log. Raises RuntimeError with the log."""
        program = ctypes.c_void_p()
        source = SOURCE.read_bytes()
        self._call("nvrtcCreateProgram", ctypes.byref(program), source, SOURCE.name.encode(), 0, None, None)
        try:
            said = [o.encode() for o in (*OPTIONS, *CUPYS, f"-arch={architecture}", "--ptxas-options=-v", *options)]
            status = self._lib.nvrtcCompileProgram(program, len(said), (ctypes.c_char_p * len(said))(*said))
            log = self._text(program, "ProgramLog").rstrip(b"\0").decode()
            if status:
                raise RuntimeError(f"{architecture}: {log}")
            return self._text(program, "CUBIN"), log
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))

    def _text(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, buffer)
        return buffer.raw

    def _call(self, name: str, *arguments: object) -> None:
        if status := getattr(self._lib, name)(*arguments):
            raise RuntimeError(f"{name}: NVRTC error {status}")


def library() -> str:
    for wheel in WHEELS:
        try:
            files = metadata.files(wheel) or []
        except metadata.PackageNotFoundError:
            continue
        for file in files:
            if re.fullmatch(r"libnvrtc\.so\.\d+", file.name):
                return str(file.locate())
    if found := ctypes.util.find_library("nvrtc"):
        return found
    raise OSError("NVRTC is not installed (it is in the extra dev)")


def resources(architecture: str, log: str) -> list[Resources]:
    """Return ptxas's report on each kernel."""
    pattern = re.compile(
        r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*?Used (\d+) registers(?:[^\n]*?, (\d+) bytes smem)?",
        re.DOTALL,
    )
    return [
        Resources(kernel, architecture, int(registers), int(shared or 0), int(stack), int(stores) + int(loads))
        for kernel, stack, stores, loads, registers, shared in pattern.findall(log)
    ]


def table(found: list[Resources]) -> str:
    """Return the resource report as Markdown."""
    lines = [
        "| kernel | architecture | registers | shared, bytes | stack, bytes | spills, bytes |",
        "|---|---|---|---|---|---|",
    ]
    for one in found:
        numbers = (one.registers, one.shared_bytes, one.stack_bytes, one.spill_bytes)
        lines.append(" | ".join([f"| `{one.kernel}`", one.architecture, *map(str, numbers)]) + " |")
    return "\n".join(lines)


def main() -> int:
    compiler = Compiler()
    found = []
    for architecture in ARCHITECTURES:
        code, log = compiler.compile(architecture)
        found += resources(architecture, log)
        if len(sys.argv) > 1:
            (Path(sys.argv[1]) / f"signals.{architecture}.cubin").write_bytes(code)
    print(f"NVRTC {compiler.version}\n\n{table(found)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
