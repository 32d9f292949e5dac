"""Verifies the provenance statement of a release with programs that other people keep.

`python deploy/verify_provenance.py dist/provenance.json`, or with the signed statement and the builder's public key
`python deploy/verify_provenance.py dist/provenance.intoto.jsonl --key key.pub`. It needs the Python packages
in-toto-attestation, whose classes parse the statement and its predicate, and securesystemslib[crypto], which checks the
signature; sha256sum checks the files beside the statement. The program runs alone: it imports nothing of Meridian.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path

from cryptography.hazmat.primitives.serialization import load_pem_public_key
from google.protobuf.json_format import MessageToDict, Parse, ParseDict, ParseError
from in_toto_attestation.predicates.provenance.v1.provenance_pb2 import Provenance
from in_toto_attestation.v1.statement import Statement
from in_toto_attestation.v1.statement_pb2 import Statement as StatementMessage
from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import Error
from securesystemslib.signer import SSlibKey


class UnverifiedError(Exception):
    """The statement, its signature or a file is not as it should be."""


def opened(envelope: str, key: bytes) -> str:
    """Return the statement in a DSSE envelope that a public key in PEM format verifies. Raises UnverifiedError."""
    try:
        read = json.loads(envelope)
        # The names that an envelope gives to its keys are only hints, and an envelope need not have them.
        signatures = [{**one, "keyid": str(number)} for number, one in enumerate(read["signatures"])]
        found = Envelope.from_dict({**read, "signatures": signatures})
        found.verify([SSlibKey.from_crypto(load_pem_public_key(key), keyid) for keyid in found.signatures], 1)
    except (Error, AttributeError, KeyError, TypeError, ValueError) as error:
        # The parser of envelopes does not check the types of their fields.
        raise UnverifiedError(f"no signature by this key: {error}") from error
    if found.payload_type != "application/vnd.in-toto+json":
        raise UnverifiedError(f"not a statement: {found.payload_type}")
    payload: bytes = found.payload
    try:
        return payload.decode()
    except UnicodeDecodeError as error:
        raise UnverifiedError(f"not a statement: {error}") from error


def verify(text: str, folder: Path) -> None:
    """Verify a statement and the files in `folder` that it names, and print what it states. Raises UnverifiedError."""
    try:
        statement = Statement.copy_from_pb(Parse(text, StatementMessage()))
        statement.validate()
        # The parser refuses fields that SLSA's schema does not have.
        predicate = ParseDict(MessageToDict(statement.pb.predicate), Provenance())
    except (ParseError, ValueError) as error:
        raise UnverifiedError(f"not a statement: {error}") from error
    if statement.pb.predicate_type != "https://slsa.dev/provenance/v1":
        raise UnverifiedError(f"not provenance: {statement.pb.predicate_type}")
    build, builder = predicate.build_definition, predicate.run_details.builder.id
    commits = [used.digest["gitCommit"] for used in build.resolved_dependencies if "gitCommit" in used.digest]
    if len(commits) != 1 or not build.build_type or not builder:
        raise UnverifiedError("the statement lacks its one source, the type of the build or the builder")
    sums = "".join(f"{subject.digest['sha256']}  {subject.name}\n" for subject in statement.pb.subject)
    done = subprocess.run(
        ["sha256sum", "--check", "--strict"], cwd=folder, input=sums, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise UnverifiedError(f"sha256sum: {done.stdout}{done.stderr}")
    print(f"{done.stdout}built from commit {commits[0]} by {builder}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("statement", type=Path, help="the statement, or the envelope with the signed statement")
    parser.add_argument("--key", type=Path, help="the builder's public key in PEM format; the signature must be by it")
    args = parser.parse_args()
    try:
        text = args.statement.read_text(encoding="utf-8")
        verify(opened(text, args.key.read_bytes()) if args.key else text, args.statement.parent)
    except (UnverifiedError, OSError, UnicodeDecodeError) as error:
        raise SystemExit(f"not verified: {error}") from None
    print(f"verified{', with its signature' if args.key else '; no signature was checked'}")


if __name__ == "__main__":
    main()
