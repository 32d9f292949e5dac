"""Decides which callers may call which methods.

The module owns the roles, the table of methods, the access file that gives roles to certificates and tokens, and the
rights of callers without an access file. The module knows nothing about how a call is served, and runs on the control
plane's event loop. The access file, which is read again when it changes, looks like this:

    [jwt]
    issuer = "https://issuer.example"
    audience = "meridian"
    keys_file = "jwks.json"

    [[identity]]
    uri = "spiffe://example/vllm/*"
    role = "agent"
"""

from __future__ import annotations

import glob
import logging
import tomllib
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import IntEnum
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal, Self
from urllib.parse import unquote

from cryptography.x509 import load_pem_x509_certificate
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from meridian_control.common.addresses import is_loopback_address
from meridian_control.common.errors import Expired, HostOnly, PermissionDenied, Unauthenticated
from meridian_control.common.reloading_file import Reloaded
from meridian_control.server.bearer_tokens import Tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from meridian_control.common.errors import MeridianError

    Metadata = Iterable[tuple[str, str | bytes]]
    # The type of the result of gRPC's auth_context().
    Certificate = Mapping[str, Iterable[bytes]]


logger = logging.getLogger(__name__)


class Role(IntEnum):
    """The roles of callers. OPERATOR may do all that VIEWER may, and ADMIN all that OPERATOR may. An AGENT may connect
    as its own engine and do nothing else. If callers need not authenticate, a caller is ANY, which may do everything,
    or GUEST, which may read, and connect as any engine."""

    NONE = 0
    AGENT = 1
    VIEWER = 2
    OPERATOR = 3
    ADMIN = 4
    ANY = 5
    GUEST = 6


@dataclass(frozen=True)
class AccessRule:
    """The role that a method requires, and whether its calls are recorded. `role` None admits every caller, also one
    without credentials."""

    role: Role | None
    recorded: bool = False


OPEN = AccessRule(None)
READ = AccessRule(Role.VIEWER)
CHANGE = AccessRule(Role.OPERATOR, recorded=True)
CONNECT = AccessRule(Role.AGENT)
# The rule of methods that are not in RULES.
UNKNOWN = AccessRule(Role.ADMIN, recorded=True)

RULES: dict[str, AccessRule] = {
    "grpc.health.v1.Health/Check": OPEN,
    "grpc.health.v1.Health/Watch": OPEN,
    "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": READ,
    "meridian.v1.AgentService/Connect": CONNECT,
    "meridian.v1.AuditService/ListAudit": AccessRule(Role.ADMIN),
    "meridian.v1.FleetService/EndThinking": CHANGE,
    "meridian.v1.FleetService/ExplainRequest": READ,
    "meridian.v1.FleetService/GetSavings": READ,
    "meridian.v1.FleetService/ListBudgets": READ,
    "meridian.v1.FleetService/ListDecisions": READ,
    "meridian.v1.FleetService/ListEngines": READ,
    "meridian.v1.FleetService/ListRequests": READ,
    "meridian.v1.FleetService/ListSelfCalibrations": READ,
    "meridian.v1.FleetService/RecordTrace": CHANGE,
    "meridian.v1.FleetService/WatchFleet": READ,
    "meridian.v1.FreezeService/Freeze": CHANGE,
    "meridian.v1.FreezeService/ListFreezes": READ,
    "meridian.v1.FreezeService/Thaw": CHANGE,
    "meridian.v1.PolicyService/DiffPolicies": READ,
    "meridian.v1.PolicyService/ExplainPolicy": READ,
    "meridian.v1.PolicyService/GetPolicy": READ,
    "meridian.v1.PolicyService/ListRevisions": READ,
    "meridian.v1.PolicyService/RollbackPolicy": CHANGE,
    "meridian.v1.PolicyService/UpdatePolicy": CHANGE,
    "meridian.v1.RolloutService/AbortRollout": CHANGE,
    "meridian.v1.RolloutService/GetRollout": READ,
    "meridian.v1.RolloutService/ListRollouts": READ,
    "meridian.v1.RolloutService/PauseRollout": CHANGE,
    "meridian.v1.RolloutService/ResumeRollout": CHANGE,
    "meridian.v1.RolloutService/StartRollout": CHANGE,
}


@dataclass(frozen=True)
class Principal:
    """A caller of the control plane. `engines` are globs of the engine ids that an agent may connect as."""

    name: str
    role: Role
    engines: tuple[str, ...] = ()

    def check(self, needed: Role, method: str) -> None:
        """Check that the role suffices for `method`, which requires the role `needed`. Raises PermissionDenied."""
        if self.role is Role.ANY:
            return
        if self.role is Role.GUEST:
            if needed > Role.VIEWER:
                raise HostOnly(method)
            return
        apart = Role.AGENT in (self.role, needed)
        if self.role is not needed if apart else self.role < needed:
            has = f"is {self.role.name.lower()}" if self.role else "has no role"
            raise PermissionDenied(f'"{self.name}" {has}; {method} needs {needed.name.lower()}')

    def check_engine(self, engine_id: str) -> None:
        """Check that the principal may connect as the engine `engine_id`. Raises PermissionDenied."""
        anonymous = self.role in (Role.ANY, Role.GUEST)
        if not anonymous and not any(fnmatchcase(engine_id, engine) for engine in self.engines):
            raise PermissionDenied(f'"{self.name}" may not connect as engine "{engine_id}"')


NO_CREDENTIALS = "no credentials: a bearer token or a client certificate is needed"
NO_TOKEN = "no credentials: a bearer token is needed; the control plane asks for certificates only with --client-ca"
NOBODY = Principal("", Role.NONE)
ANYBODY = Principal("", Role.ANY)
# Seconds for which streams outlive the token with which they began, and connections their certificate: each end of an
# engine's stream costs a part of what is known of its requests, and tokens may last for minutes only.
OUTLIVES_S = 30 * 60.0
# The principal of the call that is being served, and its host. A service that goes on after its caller has hung up must
# not ask gRPC for the host, because gRPC has let the call go.
caller: ContextVar[Principal] = ContextVar("caller", default=ANYBODY)
caller_host: ContextVar[str] = ContextVar("caller_host", default="")


@dataclass
class Demands:
    """A service demands these things of a stream's caller beside the role, while the stream is open.

    check: raises PermissionDenied if the caller may not go on. at_end: gets, once, the error with which the gate is
    about to end the stream, and returns whether the service ends the stream without that error.
    """

    check: Callable[[Principal], None] | None = None
    at_end: Callable[[MeridianError], bool] | None = None


# The demands on the caller of the stream that is being served.
demands: ContextVar[Demands | None] = ContextVar("demands", default=None)


def demand(check: Callable[[Principal], None], at_end: Callable[[MeridianError], bool]) -> None:
    """Set what the caller of the stream that is being served must have from now on; see Demands."""
    if (of_stream := demands.get()) is not None:
        of_stream.check, of_stream.at_end = check, at_end


def rule_of(method: str) -> AccessRule:
    """Return the rule of a method that is named as in an HTTP/2 path: /package.Service/Method."""
    return RULES.get(method.removeprefix("/"), UNKNOWN)


class Access:
    """Identifies callers. Without an access file callers need not authenticate: callers on this host may do everything,
    and callers on other hosts may do everything if `everybody` is set; otherwise they are guests.

    certificates: whether TLS asks callers for certificates. Raises OSError or ValueError if the access file cannot be
    used.
    """

    def __init__(self, file: Path | None = None, *, everybody: bool = False, certificates: bool = True) -> None:
        self._identities = Reloaded([file], lambda: Identities(file)) if file is not None else None
        self._everybody, self._certificates = everybody, certificates

    def identify(
        self, metadata: Metadata, certificate: Certificate, peer: str, *, begun_before: bool = False
    ) -> Principal:
        """Return the caller that a token names, or a certificate if the call has no token. `peer` is the address of the
        caller as gRPC writes it. begun_before: whether the call is a stream that began with the token, which may then
        have expired for OUTLIVES_S. So may a certificate, whose connection may be old.

        Raises Unauthenticated.
        """
        if self._identities is None:
            role = Role.ANY if self._everybody or on_this_host(peer) else Role.GUEST
            return Principal(next((name for _, name in _names(certificate)), ""), role)
        identities = self._identities.get()
        shown = [value for key, value in metadata if key == "authorization"]
        if shown:
            return identities.of_token(_bearer(shown), OUTLIVES_S if begun_before else 0.0)
        if not (names := _names(certificate)):
            raise Unauthenticated(NO_CREDENTIALS if self._certificates else NO_TOKEN)
        if _has_expired(certificate):
            raise Expired("the certificate has expired")
        return identities.of_certificate(names)


def on_this_host(peer: str) -> bool:
    """Return whether a peer, as gRPC writes it (ipv4:127.0.0.1:41234, ipv6:[::1]:41234, unix:), runs on this host.

    A peer with one of the host's network addresses does not count, because port forwarders of containers give such an
    address to callers from other hosts.
    """
    kind, _, rest = peer.partition(":")
    address = unquote(rest).rpartition(":")[0].strip("[]")
    return kind in ("unix", "unix-abstract") or is_loopback_address(address)


# ---------------------------------------------------------------------------------------------------- the access file


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _Jwt(_Strict):
    issuer: str = Field(min_length=1)
    audience: str = Field(min_length=1)
    keys_file: str = ""
    secret_file: str = ""
    role_claim: str = "role"


class _Identity(_Strict):
    uri: str = ""
    dns: str = ""
    cn: str = ""
    subject: str = ""
    role: Literal["viewer", "operator", "admin", "agent"]
    engines: tuple[str, ...] = Field((), strict=False)

    @model_validator(mode="after")
    def _one_name(self) -> Self:
        if len([name for name in (self.uri, self.dns, self.cn, self.subject) if name]) != 1:
            raise ValueError("must name exactly one of uri, dns, cn and subject")
        if self.engines and self.role != "agent":
            raise ValueError("engines are allowed for the role agent only")
        return self


class _File(_Strict):
    jwt: _Jwt | None = None
    identity: tuple[_Identity, ...] = Field((), strict=False)


class Identities:
    """The identities in one version of the access file. Raises OSError or ValueError if the file cannot be used."""

    def __init__(self, file: Path) -> None:
        try:
            contents = _File.model_validate(tomllib.loads(file.read_text(encoding="utf-8-sig")))
        except ValidationError as error:
            first = error.errors()[0]
            path = ".".join(map(str, first["loc"]))
            raise ValueError(f"{file}: {path}: {first['msg']}") from None
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None
        if contents == _File():
            # A tool that writes the file in place leaves it empty for an instant.
            raise ValueError(f"{file}: has neither [jwt] nor [[identity]], so nobody would have a role")
        self._role_claim, self._tokens = "", None
        if (said := contents.jwt) is not None:
            keys, secret = (file.parent / name if name else None for name in (said.keys_file, said.secret_file))
            self._tokens = Tokens(said.issuer, said.audience, keys_file=keys, secret_file=secret)
            self._role_claim = said.role_claim
        self._entries = contents.identity
        for number, entry in enumerate(contents.identity):
            front, _, last = entry.uri.rpartition("*")
            if entry.role == "agent" and not entry.engines and "*" in entry.uri and "/" not in last:
                logger.warning(
                    '%s: identity.%d: * matches / too, so "%s" lets a certificate with the URI %s connect as %s. If '
                    "others can get such a certificate, give this entry engines, or their URIs an entry before it",
                    file,
                    number,
                    entry.uri,
                    f"{front}other/engine-1{last}",
                    f"engine-1{last}",
                )

    def of_certificate(self, names: list[tuple[str, str]]) -> Principal:
        """Return the principal of a certificate. `names` has its pairs of kind (uri, dns or cn) and name."""
        for entry in self._entries:
            for kind, name in names:
                if (pattern := getattr(entry, kind)) and fnmatchcase(name, pattern):
                    own = name.rstrip("/").rpartition("/")[2] if kind == "uri" else name
                    return _principal(name, entry, own)
        return Principal(names[0][1], Role.NONE)

    def of_token(self, token: str, expired_s: float) -> Principal:
        if self._tokens is None:
            raise Unauthenticated("tokens are not accepted: the access file has no [jwt] section")
        claims = self._tokens.claims(token, expired_s)
        subject, engine = str(claims["sub"]), claims.get("engine")
        own = engine if isinstance(engine, str) else subject
        for entry in self._entries:
            if entry.subject and fnmatchcase(subject, entry.subject):
                return _principal(subject, entry, own)
        return Principal(subject, _claimed(claims.get(self._role_claim)), (glob.escape(own),))


def _principal(name: str, entry: _Identity, own: str) -> Principal:
    """Return the principal of an entry. An agent whose entry names no engines may connect as the engine `own`."""
    return Principal(name, Role[entry.role.upper()], entry.engines or (glob.escape(own),))


def _claimed(said: Any) -> Role:
    """Return the role that a claim names, as text or in a list with other entries. Raises Unauthenticated."""
    known = {role.name.lower(): role for role in (Role.AGENT, Role.VIEWER, Role.OPERATOR, Role.ADMIN)}
    names = [name for name in (said if isinstance(said, list) else [said]) if isinstance(name, str)]
    roles = {known[name] for name in names if name in known}
    if Role.AGENT in roles and len(roles) > 1:
        raise Unauthenticated("the token claims the role agent and a second role")
    return max(roles, default=Role.NONE)


def _names(certificate: Certificate) -> list[tuple[str, str]]:
    """Return the names in a verified certificate as pairs of kind (uri, dns or cn) and name."""
    kinds = (("uri", "peer_uri"), ("dns", "peer_dns"), ("cn", "x509_common_name"))
    return [(kind, name.decode()) for kind, key in kinds for name in certificate.get(key, ())]


def _has_expired(certificate: Certificate) -> bool:
    """Return whether a certificate, which was valid when its connection began, has expired for OUTLIVES_S."""
    latest = datetime.now(UTC) - timedelta(seconds=OUTLIVES_S)
    pems = certificate.get("x509_pem_cert", ())
    return any(load_pem_x509_certificate(pem).not_valid_after_utc < latest for pem in pems)


def _bearer(shown: list[str | bytes]) -> str:
    scheme, _, token = str(shown[0]).partition(" ")
    if len(shown) != 1 or scheme.lower() != "bearer" or not token:
        raise Unauthenticated("the authorization metadata must hold exactly one bearer token")
    return token.strip()
