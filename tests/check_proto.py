"""Generate the protobuf code, or check that the committed code equals a fresh generation, and lint the protos.

`python -m tests.check_proto` compares; `--write` writes. From the second published version on it also runs `buf
breaking` against the newest tag.
"""

import shutil
import subprocess
import sys
import tempfile
from importlib import resources
from pathlib import Path

PROTO = Path(__file__).parent.parent / "proto"
BIN = Path(sys.executable).parent


def generate(out: Path) -> list[Path]:
    """Generate messages, stubs and services of every proto file below `out`; return the relative paths."""
    sources = sorted(str(p.relative_to(PROTO)) for p in PROTO.rglob("*.proto"))
    include = resources.files("grpc_tools") / "_proto"
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO}", f"-I{include}", f"--python_out={out}"]
    command += [f"--grpc_python_out={out}", f"--mypy_out=quiet:{out}", f"--mypy_grpc_out=quiet:{out}"]
    command += [f"--plugin=protoc-gen-{name}={BIN / f'protoc-gen-{name}'}" for name in ("mypy", "mypy_grpc")]
    subprocess.run([*command, *sources], check=True, cwd=PROTO)
    return sorted(p.relative_to(out) for p in out.rglob("*.py*") if p.is_file())


def differences() -> list[str]:
    """Return the names of generated files that are missing, extra or different in the tree."""
    with tempfile.TemporaryDirectory() as scratch:
        fresh = {str(p): (Path(scratch) / p).read_text() for p in generate(Path(scratch))}
    committed = {
        str(p.relative_to(PROTO)): p.read_text() for p in PROTO.rglob("*_pb2*.py*") if "__pycache__" not in p.parts
    }
    return sorted(name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))


def buf(*args: str) -> int:
    return subprocess.run([BIN / "buf", *args], cwd=PROTO, check=False).returncode


def newest_tag() -> str | None:
    """Return the newest release tag, or None if this clone has none."""
    found = subprocess.run(
        ["git", "describe", "--tags", "--abbrev=0"], cwd=PROTO, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or None


def main() -> int:
    if "--write" in sys.argv:
        for old in PROTO.rglob("*_pb2*.py*"):
            if old.is_file():
                old.unlink()
        shutil.rmtree(PROTO / "meridian" / "v1" / "__pycache__", ignore_errors=True)
        generate(PROTO)
        return 0
    if stale := differences():
        print("generated protobuf code is stale, run `make proto`: " + ", ".join(stale))
        return 1
    if status := buf("lint"):
        return status
    if tag := newest_tag():
        return buf("breaking", "--against", f"../.git#tag={tag},subdir=proto")
    return 0


if __name__ == "__main__":
    sys.exit(main())
