"""The provenance statement of a release: other people's programs accept it, and refuse it once anything is changed."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from securesystemslib.dsse import Envelope
from securesystemslib.signer import CryptoSigner

from deploy.generate import HERE
from deploy.provenance import ENVELOPE, STATEMENT, ProvenanceError, envelope, statement
from deploy.verify_provenance import UnverifiedError, opened, verify

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

WHEEL = "meridian_llm-1.0-py3-none-any.whl"


def private(key: Ed25519PrivateKey | EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def public(key: Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Make a repository with one commit, in which the folder of built files is ignored."""
    root = tmp_path / "repository"
    (root / "dist").mkdir(parents=True)
    (root / ".gitignore").write_text("dist/\n")
    (root / "dist" / WHEEL).write_bytes(b"the wheel")
    commands = ("init", "config user.name Builder", "config user.email builder@example.org", "add .", "commit -m first")
    for command in commands:
        subprocess.run(["git", *command.split()], cwd=root, check=True, capture_output=True)
    return root


@pytest.fixture
def made(repository: Path) -> dict[str, Any]:
    return statement(repository, [repository / "dist" / WHEEL])


def test_the_verifier_names_commit_builder_and_files(repository: Path, made: dict[str, Any]) -> None:
    dist, key = repository / "dist", Ed25519PrivateKey.generate()
    text = json.dumps(made)
    (dist / STATEMENT).write_text(text)
    (dist / ENVELOPE).write_text(json.dumps(envelope(text.encode(), private(key))))
    (dist / "key.pub").write_bytes(public(key))
    program = [sys.executable, str(HERE / "verify_provenance.py")]
    plain = subprocess.run([*program, dist / STATEMENT], check=True, capture_output=True, text=True, cwd=dist)
    signed = subprocess.run(
        [*program, dist / ENVELOPE, "--key", dist / "key.pub"], check=True, capture_output=True, text=True, cwd=dist
    )
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=repository, check=True, capture_output=True, text=True)
    lines = [f"{WHEEL}: OK", f"built from commit {head.stdout.strip()} by mailto:builder@example.org"]
    assert plain.stdout.splitlines() == [*lines, "verified; no signature was checked"]
    assert signed.stdout.splitlines() == [*lines, "verified, with its signature"]


def test_a_commit_has_one_statement(repository: Path, made: dict[str, Any]) -> None:
    assert statement(repository, [repository / "dist" / WHEEL]) == made


@pytest.mark.parametrize("name", [".gitignore", "new.py"])
def test_no_statement_is_made_if_a_file_differs_from_the_commit(repository: Path, name: str) -> None:
    with (repository / name).open("a") as file:
        file.write("build/\n")
    with pytest.raises(ProvenanceError, match=name):
        statement(repository, [repository / "dist" / WHEEL])


def test_a_changed_file_is_refused(repository: Path, made: dict[str, Any]) -> None:
    (repository / "dist" / WHEEL).write_bytes(b"the Wheel")
    with pytest.raises(UnverifiedError, match=f"{WHEEL}: FAILED"):
        verify(json.dumps(made), repository / "dist")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda made: made.update(_type="https://in-toto.io/Statement/v0.1"), "Wrong statement type"),
        (lambda made: made.update(subject=[]), "At least one subject"),
        (lambda made: made["subject"][0].update(digest={}), "At least one digest"),
        (lambda made: made["subject"][0].update(digest={"sha1": "0" * 40}), "sha256sum"),
        (lambda made: made.update(predicateType="https://slsa.dev/provenance/v0.2"), "not provenance"),
        (lambda made: made["predicate"].update(materials=[]), 'no field named "materials"'),
        (lambda made: made["predicate"]["runDetails"]["builder"].pop("id"), "the builder"),
        (lambda made: made["predicate"]["buildDefinition"].pop("resolvedDependencies"), "its one source"),
    ],
)
def test_a_changed_statement_is_refused(
    repository: Path, made: dict[str, Any], change: Callable[[dict[str, Any]], object], words: str
) -> None:
    verify(json.dumps(made), repository / "dist")
    change(made)
    with pytest.raises(UnverifiedError, match=words):
        verify(json.dumps(made), repository / "dist")


def test_only_the_signature_of_the_given_key_counts() -> None:
    key, other = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    signed = envelope(b"{}", private(key))
    assert opened(json.dumps(signed), public(key)) == "{}"
    changed: list[dict[str, Any]] = [{"payload": "e30K"}, {"payloadType": "text/plain"}]
    changed += [{"signatures": []}, {"signatures": [{"keyid": "a"}]}]
    for envelopes, by in [(signed, other), *((signed | change, key) for change in changed)]:
        with pytest.raises(UnverifiedError, match="no signature by this key"):
            opened(json.dumps(envelopes), public(by))


def test_signatures_need_no_names() -> None:
    key, other = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    two = [envelope(b"{}", private(by))["signatures"][0] for by in (other, key)]
    for names in ({}, {"keyid": ""}):
        signatures = [{"sig": signature["sig"], **names} for signature in two]
        signed = envelope(b"{}", private(key)) | {"signatures": signatures}
        assert opened(json.dumps(signed), public(key)) == "{}"
        with pytest.raises(UnverifiedError, match="no signature by this key"):
            opened(json.dumps(signed | {"signatures": signatures[:1]}), public(key))


@pytest.mark.parametrize(
    "envelope_text",
    ["[]", "null", '"a"', '{"payload": 5, "payloadType": "a", "signatures": []}']
    + [f'{{"payload": "", "payloadType": "a", "signatures": {signatures}}}' for signatures in ("5", '["a"]')],
)
def test_what_is_no_envelope_is_refused(envelope_text: str) -> None:
    with pytest.raises(UnverifiedError, match="no signature by this key"):
        opened(envelope_text, public(Ed25519PrivateKey.generate()))


def test_a_signed_payload_that_is_no_text_is_refused() -> None:
    key = Ed25519PrivateKey.generate()
    with pytest.raises(UnverifiedError, match="not a statement"):
        opened(json.dumps(envelope(b"\xff", private(key))), public(key))


@pytest.mark.parametrize("content", [None, b"\xff"])
def test_the_verifier_says_in_one_line_that_it_cannot_read_a_file(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / STATEMENT
    if content is not None:
        path.write_bytes(content)
    program = [sys.executable, str(HERE / "verify_provenance.py"), str(path)]
    done = subprocess.run(program, check=False, capture_output=True, text=True)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert done.stderr.startswith("not verified: ")


def test_a_signature_for_another_type_of_payload_does_not_count() -> None:
    key = Ed25519PrivateKey.generate()
    signed = Envelope(b"{}", "text/plain", {})
    signed.sign(CryptoSigner(key))
    with pytest.raises(UnverifiedError, match="not a statement: text/plain"):
        opened(json.dumps(signed.to_dict()), public(key))


def test_another_kind_of_key_is_refused() -> None:
    with pytest.raises(ProvenanceError, match="not an Ed25519 key"):
        envelope(b"{}", private(generate_private_key(SECP256R1())))
