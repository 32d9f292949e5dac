"""Writes a SLSA provenance statement about the files of a release, and signs it if a key is given.

`make provenance` runs this module. The statement is an in-toto Statement v1 whose predicate is SLSA Provenance v1. It
holds no times, so one person's builds of one commit with the same tools have the same statement. The module does not
verify: `deploy/verify_provenance.py` does, and shares no code with this module.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import platform
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parent.parent
STATEMENT, ENVELOPE = "provenance.json", "provenance.intoto.jsonl"


class ProvenanceError(Exception):
    """A statement about these files would be wrong, or the key is of another kind."""


def statement(root: Path, files: Sequence[Path]) -> dict[str, Any]:
    """Return the statement that `files` were built from the commit that is checked out in `root`.

    The builder is the person whose address git would write into a commit. Raises ProvenanceError if a file in `root`
    differs from the commit, because the commit then does not determine what was built.
    """
    if changed := _git(root, "status", "--porcelain"):
        raise ProvenanceError(f"these files differ from the commit:\n{changed}")
    source = {"name": "source", "digest": {"gitCommit": _git(root, "rev-parse", "HEAD")}}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = {(d.metadata["Name"].lower(), d.version) for d in metadata.distributions()}
    tools = [{"uri": f"pkg:pypi/{name}@{version}"} for name, version in sorted(found) if name != project["name"]]
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": file.name, "digest": {"sha256": _sha256(file)}} for file in files],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": f"pkg:pypi/{project['name']}@{project['version']}#Makefile",
                "externalParameters": {"source": source, "targets": ["dist", "sbom"]},
                "resolvedDependencies": [source, *tools],
            },
            "runDetails": {
                "builder": {
                    "id": f"mailto:{_git(root, 'config', 'user.email')}",
                    "version": {"python": platform.python_version()},
                },
            },
        },
    }


def envelope(payload: bytes, key: bytes) -> dict[str, Any]:
    """Return a statement in a DSSE v1 envelope, signed by a private Ed25519 key in PEM format without a passphrase.

    Raises ProvenanceError if the key is of another kind. Source: the protocol of github.com/secure-systems-lab/dsse.
    """
    private = load_pem_private_key(key, None)
    if not isinstance(private, Ed25519PrivateKey):
        raise ProvenanceError("the key is not an Ed25519 key")
    kind = "application/vnd.in-toto+json"
    signature = private.sign(b"DSSEv1 %d %b %d %b" % (len(kind), kind.encode(), len(payload), payload))
    keyid = hashlib.sha256(private.public_key().public_bytes_raw()).hexdigest()
    signatures = [{"keyid": keyid, "sig": base64.b64encode(signature).decode()}]
    return {"payload": base64.b64encode(payload).decode(), "payloadType": kind, "signatures": signatures}


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout.strip()


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m deploy.provenance", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="files that were built, in one folder")
    parser.add_argument("--key", type=Path, help="private Ed25519 key in PEM format, to sign the statement")
    args = parser.parse_args()
    folder = args.files[0].parent
    try:
        text = json.dumps(statement(ROOT, args.files), indent=1) + "\n"
        signed = json.dumps(envelope(text.encode(), args.key.read_bytes())) + "\n" if args.key else ""
    except ProvenanceError as error:
        raise SystemExit(f"no statement was written: {error}") from None
    (folder / STATEMENT).write_text(text, encoding="utf-8")
    if signed:
        (folder / ENVELOPE).write_text(signed, encoding="utf-8")


if __name__ == "__main__":
    main()
