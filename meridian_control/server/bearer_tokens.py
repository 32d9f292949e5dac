"""Checks bearer tokens (JWT, RFC 7519) against the keys that sign them.

The module owns the checks of signature, issuer, audience and time. The key determines the signature algorithm; the
token cannot choose one. The module knows nothing about roles. The keys are read again when their file changes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jwt
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from meridian_control.common.errors import Expired, Unauthenticated
from meridian_control.common.reloading_file import Reloaded

if TYPE_CHECKING:
    from pathlib import Path

# Largest difference between the clocks of the issuer and the control plane.
LEEWAY_S = 30
MIN_SECRET_BYTES = 32
_CURVES = {"secp256r1": "ES256", "secp384r1": "ES384", "secp521r1": "ES512"}
_COMPLAINTS: tuple[tuple[type[jwt.InvalidTokenError], str], ...] = (
    (jwt.ExpiredSignatureError, "the token has expired"),
    (jwt.ImmatureSignatureError, "the token is not valid yet"),
    (jwt.InvalidIssuerError, "the token's issuer is not the one that is trusted"),
    (jwt.InvalidAudienceError, "the token is for another audience"),
    (jwt.MissingRequiredClaimError, "the token lacks a claim: exp, iss, aud and sub are required"),
    (jwt.InvalidSignatureError, "the token's signature does not fit any trusted key"),
    (jwt.InvalidAlgorithmError, "the token's signature does not fit any trusted key"),
)


@dataclass(frozen=True)
class Key:
    """A key that checks signatures. `key_id` is None if the key file gives the key no id."""

    value: Any
    algorithm: str
    key_id: str | None = None


class Tokens:
    """Checks the tokens of one issuer for one audience. `keys_file` holds a JWKS or one PEM public key; `secret_file`,
    given instead of `keys_file`, holds an HMAC secret. Raises OSError or ValueError if the file cannot be used."""

    def __init__(self, issuer: str, audience: str, *, keys_file: Path | None, secret_file: Path | None) -> None:
        self._issuer, self._audience = issuer, audience
        if (file := keys_file or secret_file) is None or (keys_file and secret_file):
            raise ValueError("jwt: needs either keys_file or secret_file, not both")
        read = _public_keys if keys_file else _secret
        self._keys = Reloaded([file], lambda: read(file))

    def claims(self, token: str, expired_s: float = 0.0) -> dict[str, Any]:
        """Return the claims of a valid token, or of one that was valid until `expired_s` seconds ago at most. Raises
        Unauthenticated for any other token."""
        try:
            key_id = jwt.get_unverified_header(token).get("kid")
        except jwt.InvalidTokenError:
            raise Unauthenticated("the token is not a JWT") from None
        keys = [key for key in self._keys.get() if key_id is None or key.key_id in (None, key_id)]
        failure: jwt.InvalidTokenError = jwt.InvalidSignatureError()
        for key in keys:
            try:
                return self._decoded(token, key, LEEWAY_S + expired_s)
            except (jwt.InvalidSignatureError, jwt.InvalidAlgorithmError) as error:
                failure = error
            except jwt.InvalidTokenError as error:
                failure = error
                break
        said = next((text for kind, text in _COMPLAINTS if isinstance(failure, kind)), "the token is not valid")
        raise (Expired if isinstance(failure, jwt.ExpiredSignatureError) else Unauthenticated)(said) from None

    def _decoded(self, token: str, key: Key, leeway_s: float) -> dict[str, Any]:
        claims: dict[str, Any] = jwt.decode(
            token,
            key.value,
            algorithms=[key.algorithm],
            audience=self._audience,
            issuer=self._issuer,
            leeway=leeway_s,
            options={"require": ["exp", "iss", "aud", "sub"]},
        )
        return claims


def _public_keys(file: Path) -> list[Key]:
    text = file.read_text(encoding="utf-8-sig")
    if not text.lstrip().startswith("{"):
        return [_pem(file, text)]
    try:
        listed = jwt.PyJWKSet.from_dict(json.loads(text)).keys
    except (ValueError, KeyError, TypeError, jwt.PyJWTError) as error:
        raise ValueError(f"{file}: is no JWKS (JSON Web Key Set): {error}") from error
    # Symmetric keys ("oct"), which a JWKS may also hold, are secrets and do not belong in a file of public keys.
    keys = [Key(key.key, key.algorithm_name, key.key_id) for key in listed if key.key_type != "oct"]
    if not keys:
        raise ValueError(f"{file}: holds no public key")
    return keys


def _pem(file: Path, text: str) -> Key:
    try:
        key = load_pem_public_key(text.encode())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ValueError(f"{file}: holds neither a JWKS nor a PEM public key") from error
    if isinstance(key, rsa.RSAPublicKey):
        return Key(key, "RS256")
    if isinstance(key, ed25519.Ed25519PublicKey):
        return Key(key, "EdDSA")
    if isinstance(key, ec.EllipticCurvePublicKey) and key.curve.name in _CURVES:
        return Key(key, _CURVES[key.curve.name])
    raise ValueError(f"{file}: must be an RSA, Ed25519 or NIST curve key")


def _secret(file: Path) -> list[Key]:
    secret = file.read_bytes().strip()
    if len(secret) < MIN_SECRET_BYTES:
        raise ValueError(f"{file}: must hold at least {MIN_SECRET_BYTES} bytes")
    return [Key(secret, "HS256")]
