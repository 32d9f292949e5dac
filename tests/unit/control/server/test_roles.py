"""Names and roles from certificates and tokens: the access file, the checks of tokens, and files that change."""

from __future__ import annotations

import json
import os
import time
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from meridian_control.common import reloading_file
from meridian_control.common.errors import PermissionDenied, Unauthenticated
from meridian_control.common.reloading_file import Reloaded
from meridian_control.server.bearer_tokens import Tokens
from meridian_control.server.roles import OUTLIVES_S, Access, Principal, Role, on_this_host
from tests.certificates import Authority

SECRET = "0123456789abcdef0123456789abcdef"
ELSEWHERE = "ipv4:10.0.0.7:41234"
KEYS: dict[str, Any] = {
    "RS256": rsa.generate_private_key(65537, 2048),
    "ES256": ec.generate_private_key(ec.SECP256R1()),
    "ES384": ec.generate_private_key(ec.SECP384R1()),
    "EdDSA": ed25519.Ed25519PrivateKey.generate(),
}
# A key of a kind that no library knows.
UNKNOWN_KIND = "-----BEGIN PUBLIC KEY-----\nMA4wBQYDK2VyAwUAYWJjZA==\n-----END PUBLIC KEY-----\n"
LACKS = "the token lacks a claim: exp, iss, aud and sub are required"
HEAD = '[jwt]\nissuer = "issuer"\naudience = "meridian"\nsecret_file = "secret"\n'


def token(key: Any = SECRET, algorithm: str = "HS256", kid: str | None = None, **claims: Any) -> str:
    said = {"iss": "issuer", "aud": "meridian", "sub": "ann", "exp": time.time() + 3600, **claims}
    said = {name: value for name, value in said.items() if value is not None}
    return jwt.encode(said, key, algorithm, headers={"kid": kid} if kid else None)


def public_pem(key: Any) -> str:
    return str(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo), "ascii")


def jwk(algorithm: str, kid: str | None = None) -> dict[str, Any]:
    from jwt.algorithms import get_default_algorithms

    found: dict[str, Any] = json.loads(get_default_algorithms()[algorithm].to_jwk(KEYS[algorithm].public_key()))
    return found | ({"kid": kid} if kid else {})


def tokens(path: Path, content: str, secret: bool = False) -> Tokens:
    path.write_text(content)
    return Tokens("issuer", "meridian", keys_file=None if secret else path, secret_file=path if secret else None)


# ------------------------------------------------------------------------------------------------------------ tokens


@pytest.mark.parametrize("algorithm", KEYS)
def test_a_public_key_as_pem_or_jwks(tmp_path: Path, algorithm: str) -> None:
    shown = token(KEYS[algorithm], algorithm)
    for content in (public_pem(KEYS[algorithm]), json.dumps({"keys": [jwk(algorithm)]})):
        assert tokens(tmp_path / "keys", content).claims(shown)["sub"] == "ann"


def test_several_keys(tmp_path: Path) -> None:
    """A token's key is found by the id that the token names, or by trying all keys; a token that names the id of
    another key is refused."""
    found = tokens(tmp_path / "keys", json.dumps({"keys": [jwk("ES256", "a"), jwk("RS256", "b"), jwk("EdDSA")]}))
    for algorithm, kid in (("ES256", "a"), ("RS256", "b"), ("ES256", None), ("EdDSA", None), ("EdDSA", "c")):
        found.claims(token(KEYS[algorithm], algorithm, kid))
    for algorithm, kid in (("ES256", "b"), ("RS256", "a"), ("ES256", "c")):
        with pytest.raises(Unauthenticated, match="signature"):
            found.claims(token(KEYS[algorithm], algorithm, kid))


@pytest.mark.parametrize(
    ("claims", "complaint"),
    [
        ({"exp": 1}, "the token has expired"),
        ({"nbf": 2**33}, "the token is not valid yet"),
        ({"iss": "other"}, "the token's issuer is not the one that is trusted"),
        ({"aud": "other"}, "the token is for another audience"),
        ({"aud": ["x", "y"]}, "the token is for another audience"),
        *(({name: None}, LACKS) for name in ("exp", "iss", "aud", "sub")),
        ({"key": "x" * 32}, "the token's signature does not fit any trusted key"),
        ({"algorithm": "HS512", "key": SECRET * 2}, "the token's signature does not fit any trusted key"),
    ],
)
def test_tokens_that_are_not_accepted(tmp_path: Path, claims: dict[str, Any], complaint: str) -> None:
    found = tokens(tmp_path / "secret", SECRET, secret=True)
    with pytest.raises(Unauthenticated) as raised:
        found.claims(token(**claims))
    assert str(raised.value) == complaint


@pytest.mark.parametrize(
    ("past_s", "accepted"), [(0.0, True), (10.0, True), (31.0, False), (60.0, False), (300.0, False)]
)
def test_a_token_outlives_its_end_by_the_leeway_only(tmp_path: Path, past_s: float, accepted: bool) -> None:
    """The clocks of the issuer and of the control plane may differ by 30 s, in both directions."""
    found, now = tokens(tmp_path / "secret", SECRET, secret=True), time.time()
    # The time that the test takes brings the beginning of the validity nearer.
    early_s = past_s if accepted else past_s + 300
    cases: list[tuple[dict[str, Any], str]] = [
        ({"exp": now - past_s}, "the token has expired"),
        ({"nbf": now + early_s, "exp": now + 1000}, "the token is not valid yet"),
    ]
    for claims, complaint in cases:
        if accepted:
            assert found.claims(token(**claims))["sub"] == "ann"
        else:
            with pytest.raises(Unauthenticated, match=complaint):
                found.claims(token(**claims))


def test_a_subject_that_is_no_text(tmp_path: Path) -> None:
    claims = {"iss": "issuer", "aud": "meridian", "sub": 7, "exp": time.time() + 60}
    shown = jwt.PyJWS().encode(json.dumps(claims).encode(), SECRET, "HS256")
    with pytest.raises(Unauthenticated, match="the token is not valid"):
        tokens(tmp_path / "secret", SECRET, secret=True).claims(shown)


def test_a_token_does_not_choose_its_algorithm(tmp_path: Path) -> None:
    """A token is refused if it is unsigned (`none`), or signed with the public key as if that key were a shared
    secret."""
    public = public_pem(KEYS["RS256"])
    found = tokens(tmp_path / "keys", public)
    unsigned = jwt.encode({"iss": "issuer", "aud": "meridian", "sub": "x", "exp": time.time() + 60}, "", "none")
    header, payload, _ = token("x" * 40).split(".")
    import base64
    import hashlib
    import hmac

    signed = hmac.new(public.encode(), f"{header}.{payload}".encode(), hashlib.sha256).digest()
    confused = f"{header}.{payload}.{base64.urlsafe_b64encode(signed).decode().rstrip('=')}"
    for shown in (unsigned, confused):
        with pytest.raises(Unauthenticated, match="signature"):
            found.claims(shown)
    for nonsense in ("", "x", "a.b.c", "é.é.é"):
        with pytest.raises(Unauthenticated, match="is not a JWT"):
            found.claims(nonsense)


def test_key_files_that_cannot_be_used(tmp_path: Path) -> None:
    short_curve = public_pem(ec.generate_private_key(ec.SECP224R1()))
    secret = {"kty": "oct", "k": "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY"}
    for content, complaint in (
        ("nonsense", "holds neither a JWKS nor a PEM public key"),
        ("{}", "is no JWKS"),
        ('{"keys": []}', "is no JWKS"),
        (json.dumps({"keys": [secret]}), "holds no public key"),
        ('{"keys": [{"kty": "RSA", "n": "AQAB", "e": "AQAB", "alg": ["RS256"]}]}', "is no JWKS"),
        (UNKNOWN_KIND, "holds neither a JWKS nor a PEM public key"),
        (short_curve, "must be an RSA, Ed25519 or NIST curve key"),
    ):
        with pytest.raises(ValueError, match=complaint):
            tokens(tmp_path / "keys", content)
    with pytest.raises(ValueError, match="must hold at least 32 bytes"):
        tokens(tmp_path / "secret", "short", secret=True)


# ------------------------------------------------------------------------------------------------------- access file


def access(folder: Path, text: str) -> Access:
    (folder / "secret").write_text(SECRET + "\n")
    (folder / "access.toml").write_text(text)
    return Access(folder / "access.toml")


def by_token(found: Access, shown: str) -> Principal:
    return found.identify([("authorization", f"Bearer {shown}")], {}, ELSEWHERE)


def may_be(principal: Principal, engine_id: str) -> bool:
    try:
        principal.check_engine(engine_id)
    except PermissionDenied:
        return False
    return True


def test_roles_of_tokens(tmp_path: Path) -> None:
    found = access(tmp_path, HEAD + 'role_claim = "r"\n[[identity]]\nsubject = "ops-*"\nrole = "admin"\n')
    for claims, role in (
        ({}, Role.NONE),
        ({"r": "viewer"}, Role.VIEWER),
        ({"r": ["x", "operator", "viewer"]}, Role.OPERATOR),
        ({"r": "root"}, Role.NONE),
        ({"r": {"admin": True}}, Role.NONE),
        ({"role": "admin"}, Role.NONE),
        ({"r": "viewer", "sub": "ops-1"}, Role.ADMIN),
        ({"r": "agent"}, Role.AGENT),
    ):
        assert by_token(found, token(**claims)).role is role, claims
    with pytest.raises(Unauthenticated, match="the role agent and a second role"):
        by_token(found, token(r=["agent", "admin"]))


def test_engines_of_agents(tmp_path: Path) -> None:
    entries = '[[identity]]\nsubject = "sa:*"\nrole = "agent"\nengines = ["gpu-*"]\n'
    entries += '[[identity]]\nuri = "spiffe://here/*"\nrole = "agent"\n[[identity]]\ncn = "c*"\nrole = "agent"\n'
    found = access(tmp_path, HEAD + entries)
    for principal, own, others in (
        (by_token(found, token(role="agent", sub="e1")), "e1", ("e2", "", "E1")),
        (by_token(found, token(role="agent", sub="s", engine="e1")), "e1", ("s",)),
        (by_token(found, token(role="agent", sub="*")), "*", ("e1",)),
        (by_token(found, token(sub="sa:x", engine="e1")), "gpu-1", ("e1", "sa:x")),
        (found.identify((), {"peer_uri": [b"spiffe://here/ns/e1"]}, ELSEWHERE), "e1", ("ns",)),
        (found.identify((), {"peer_uri": [b"spiffe://here/[a]"]}, ELSEWHERE), "[a]", ("a",)),
        (found.identify((), {"x509_common_name": [b"c1"], "peer_dns": [b"other"]}, ELSEWHERE), "c1", ("other", "c2")),
    ):
        assert principal.role is Role.AGENT
        assert may_be(principal, own)
        assert not any(may_be(principal, other) for other in others)
    assert not may_be(by_token(found, token(role="admin", sub="other")), "other-engine")


def test_certificates_and_tokens(tmp_path: Path) -> None:
    """If a caller shows a certificate and a token, the token decides; a certificate does not make up for a bad
    token."""
    found = access(tmp_path, HEAD + '[[identity]]\ndns = "ops.example"\nrole = "operator"\n')
    certificate = {"peer_dns": [b"ops.example"]}
    assert found.identify((), certificate, ELSEWHERE) == Principal("ops.example", Role.OPERATOR, ("ops.example",))
    both = found.identify([("authorization", f"bearer {token(role='viewer')}")], certificate, ELSEWHERE)
    assert (both.name, both.role) == ("ann", Role.VIEWER)
    assert found.identify((), {"peer_dns": [b"x"]}, ELSEWHERE) == Principal("x", Role.NONE)
    for metadata in (
        [("authorization", f"Bearer {token('x' * 32)}")],
        [("authorization", "Basic eDp5")],
        [("authorization", "Bearer ")],
        [("authorization", f"Bearer {token()}")] * 2,
    ):
        with pytest.raises(Unauthenticated):
            found.identify(metadata, certificate, ELSEWHERE)
    with pytest.raises(Unauthenticated, match="no credentials"):
        found.identify((), {"transport_security_type": [b"ssl"]}, ELSEWHERE)
    assert Access(everybody=True).identify((), certificate, ELSEWHERE) == Principal("ops.example", Role.ANY)
    assert Access().identify((), certificate, ELSEWHERE) == Principal("ops.example", Role.GUEST)
    assert Access().identify((), {}, "unix:") == Principal("", Role.ANY)


def test_a_connection_outlives_its_certificate_for_a_while(tmp_path: Path) -> None:
    found = access(tmp_path, '[[identity]]\ndns = "ops.example"\nrole = "operator"\n')
    certificate = {"peer_dns": [b"ops.example"]}
    authority = Authority(tmp_path)
    for lasts_s, usable in ((60.0, True), (60 - OUTLIVES_S, True), (-60 - OUTLIVES_S, False)):
        pem = authority.issue("ops.example", lasts=timedelta(seconds=lasts_s)).cert.read_bytes()
        with nullcontext() if usable else pytest.raises(Unauthenticated, match="the certificate has expired"):
            found.identify((), certificate | {"x509_pem_cert": [pem]}, ELSEWHERE)


@pytest.mark.parametrize(
    ("entry", "example"),
    [
        ('uri = "spiffe://example/vllm/*"', "spiffe://example/vllm/other/engine-1"),
        ('uri = "spiffe://example/*/sa/*"', "spiffe://example/*/sa/other/engine-1"),
        ('uri = "*"', "other/engine-1"),
        ('uri = "spiffe://example/vllm/*"\nengines = ["prod-*"]', ""),
        ('uri = "spiffe://example/*/sa/engine-1"', ""),
        ('uri = "spiffe://example/vllm/engine-1"', ""),
        ('dns = "*.vllm"', ""),
        ('cn = "*"', ""),
        # Only agents have an engine of their own.
        ('uri = "spiffe://example/*"\nrole = "viewer"', ""),
    ],
)
def test_a_pattern_that_matches_more_than_it_seems_is_said(
    tmp_path: Path, entry: str, example: str, caplog: pytest.LogCaptureFixture
) -> None:
    role = "" if "role" in entry else 'role = "agent"'
    found = access(tmp_path, f"[[identity]]\n{entry}\n{role}\n")
    lines = [record.getMessage() for record in caplog.records if "* matches / too" in record.getMessage()]
    assert len(lines) == bool(example)
    if example:
        assert "identity.0: * matches / too" in lines[0]
        assert f"lets a certificate with the URI {example} connect as engine-1" in lines[0]
        # The example is true.
        uri = example.replace("*", "any").encode()
        assert found.identify((), {"peer_uri": [uri]}, ELSEWHERE).engines == ("engine-1",)


@pytest.mark.parametrize(
    ("peer", "local"),
    [
        ("ipv4:127.0.0.1:41234", True),
        ("ipv4:127.9.8.7:1", True),
        ("ipv6:[::1]:41234", True),
        ("ipv6:%5B::1%5D:41234", True),
        ("ipv6:[::ffff:127.0.0.1]:41234", True),
        ("unix:", True),
        ("unix:/run/meridian", True),
        ("unix-abstract:name", True),
        ("ipv4:10.0.0.7:41234", False),
        ("ipv4:128.0.0.1:41234", False),
        ("ipv4:1.127.0.0:1", False),
        ("ipv6:[2001:db8::1]:41234", False),
        ("ipv6:[::ffff:10.0.0.7]:41234", False),
        ("ipv6:[fe80::1%25eth0]:41234", False),
        ("ipv6:[::]:1", False),
        ("ipv4:0.0.0.0:1", False),
        ("ipv4:localhost:1", False),
        ("vsock:2:1", False),
        ("unknown", False),
        ("", False),
    ],
)
def test_who_is_on_this_host(peer: str, local: bool) -> None:
    assert on_this_host(peer) is local


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[", "access.toml: "),
        ("x = 1", "access.toml: x: Extra inputs are not permitted"),
        ('[[identity]]\nrole = "admin"', "must name exactly one of uri, dns, cn and subject"),
        ('[[identity]]\ncn = "a"\ndns = "b"\nrole = "admin"', "must name exactly one of uri, dns, cn and subject"),
        ('[[identity]]\ncn = "a"\nrole = "root"', "identity.0.role: "),
        ('[[identity]]\ncn = "a"\nrole = "admin"\nengines = ["x"]', "engines are allowed for the role agent only"),
        ("", "access.toml: has neither [jwt] nor [[identity]]"),
        ('[jwt]\nissuer = "a"\naudience = "b"', "needs either keys_file or secret_file"),
        ('[jwt]\nissuer = ""\naudience = "b"\nsecret_file = "secret"', "jwt.issuer: "),
        ('[jwt]\nissuer = "a"\naudience = "b"\nsecret_file = "no"', "No such file"),
    ],
)
def test_access_files_that_cannot_be_used(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises((ValueError, OSError)) as raised:
        access(tmp_path, text)
    assert complaint in str(raised.value)


# ------------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("bad", ["bad", "[" * 100_000])
def test_files_are_read_when_they_change(tmp_path: Path, caplog: pytest.LogCaptureFixture, bad: str) -> None:
    """The second bad text lets the parser raise RecursionError, which no reader of a file foresees."""
    file = tmp_path / "file"
    file.write_text("1")
    reads = [0]

    def read() -> list[int]:
        reads[0] += 1
        return [json.loads(file.read_text())]

    found = Reloaded([file], read)
    first = found.get()
    assert found.get() is first
    assert reads == [1]
    file.write_text(bad)
    assert found.get() is found.get() is first
    assert (reads, sum("cannot be used" in message for message in caplog.messages)) == ([2], 1)
    file.unlink()
    assert found.get() is first
    # Kubernetes changes a Secret in this way: it renames a new link over the old link.
    (tmp_path / "new").write_text("2")
    os.symlink("new", tmp_path / "link")
    os.replace(tmp_path / "link", file)
    assert found.get() == [2]
    file.write_text(bad)
    assert found.get() == [2]
    assert sum("cannot be used" in message for message in caplog.messages) == 3, "the error has come back"
    with pytest.raises((json.JSONDecodeError, RecursionError)):
        Reloaded([file], read)


def test_an_access_file_that_is_written_in_place_takes_no_role_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = '[[identity]]\ncn = "ann"\nrole = "admin"\n'
    found = access(tmp_path, text)
    certificate = {"x509_common_name": [b"ann"]}
    for written in ("", "# Made by a tool.\n"):
        (tmp_path / "access.toml").write_text(written)
        assert found.identify([], certificate, ELSEWHERE).role is Role.ADMIN
    assert caplog.text.count("nobody would have a role") == 2
    (tmp_path / "access.toml").write_text(text.replace("ann", "bob"))
    assert found.identify([], certificate, ELSEWHERE).role is Role.NONE


def test_an_access_file_whose_keys_come_later_is_read_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An admin who is taken out in the same change keeps no role."""
    found = access(tmp_path, '[[identity]]\ncn = "ann"\nrole = "admin"')
    certificate = {"x509_common_name": [b"ann"]}
    text = HEAD.replace('"secret"', '"later"') + '[[identity]]\nuri = "spiffe://a/*"\nrole = "agent"'
    (tmp_path / "access.toml").write_text(text)
    assert found.identify([], certificate, ELSEWHERE).role is Role.ADMIN
    (tmp_path / "later").write_text("short")
    assert found.identify([], certificate, ELSEWHERE).role is Role.ADMIN
    monkeypatch.setattr(reloading_file, "RETRY_S", 0.0)
    monkeypatch.setattr(time, "monotonic", partial(float, time.monotonic() + 10.0))
    assert found.identify([], certificate, ELSEWHERE).role is Role.ADMIN
    assert found.identify([], certificate, ELSEWHERE).role is Role.ADMIN
    (tmp_path / "later").write_text(SECRET)
    assert found.identify([], certificate, ELSEWHERE).role is Role.NONE
    assert caplog.text.count("cannot be used") == 2
    assert caplog.text.count("* matches / too") == 1
    assert found.identify([("authorization", f"Bearer {token()}")], {}, ELSEWHERE).name == "ann"
