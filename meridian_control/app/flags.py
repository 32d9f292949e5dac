"""`meridian-control`'s flags, and the addresses in them: what is listened on, and what that needs to be safe.

Knows nothing of what is served. Pure, but for reading TLS files.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
from pathlib import Path
from typing import TYPE_CHECKING

from meridian_control import __version__
from meridian_control.access.rate_limits import CallLimits
from meridian_control.access.server_tls import server_credentials
from meridian_control.cluster.membership import own_host

if TYPE_CHECKING:
    import grpc


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="meridian-control", description="The control plane for reasoning models on vLLM.")
    p.add_argument(
        "--listen", default="127.0.0.1:50051", help="address of the gRPC server: host:port, :port for all, unix:PATH"
    )
    p.add_argument("--tls-cert", type=Path, help="PEM certificate chain of the server; read again when it changes")
    p.add_argument("--tls-key", type=Path, help="its PEM key")
    p.add_argument(
        "--client-ca",
        type=Path,
        help="PEM certificates of the CA that every client's must be signed by, one with a token included",
    )
    p.add_argument(
        "--access",
        type=Path,
        help="file that says who may do what; read again when it changes. Without it and --client-ca, changes are "
        "taken from this host only",
    )
    p.add_argument(
        "--insecure",
        action="store_true",
        help="let everybody who reaches --listen change everything, and --page-listen be any address",
    )
    p.add_argument("--max-engines", type=int, default=CallLimits.engines, help="engines connected at once, at most")
    p.add_argument("--metrics-listen", default="127.0.0.1:9464", help="address of /metrics; empty switches it off")
    p.add_argument("--page-listen", default="127.0.0.1:9465", help="address of the status page; empty switches it off")
    p.add_argument("--health-listen", default="", help="address that serves health alone, without TLS, for probes")
    files = p.add_mutually_exclusive_group()
    files.add_argument(
        "--policy", type=Path, help="file an empty store begins with; default: ./meridian.toml, then the user's"
    )
    files.add_argument("--policy-dir", type=Path, help="directory whose meridian.toml is put in force when it changes")
    p.add_argument(
        "--store",
        default=os.environ.get("MERIDIAN_STORE", "meridian.db"),
        help="where revisions are kept: a SQLite file, or postgresql://… for several replicas",
    )
    p.add_argument(
        "--advertise",
        help="host:port where other replicas reach this one; default: as --listen, with the host's own address",
    )
    p.add_argument(
        "--decision-log", type=Path, help="file for decisions and their outcomes, JSON lines, rotated; default: none"
    )
    p.add_argument(
        "--otlp-endpoint",
        default=os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"),
        help="where requests are sent as OpenTelemetry traces, over gRPC; default: nowhere",
    )
    p.add_argument(
        "--trace-ratio", type=float, default=0.01, help="share of the requests traced that bring no trace of their own"
    )
    p.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    p.add_argument("--version", action="version", version=__version__)
    return p


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port` or `:port`. Raises ValueError."""
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"an address must be host:port or :port; got {address!r}")
    return host.strip("[]"), int(port)


def bindable(address: str) -> str:
    """The address as gRPC writes it. Raises ValueError."""
    host, port = split_address(address)
    host = host or "::"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def advertised(said: str | None, listen: str) -> str:
    """Where other replicas reach this one. Raises ValueError."""
    host, port = split_address(said or listen)
    if not said and host in ("", "::", "0.0.0.0"):
        host = own_host()
    if not host or not port:
        raise ValueError(f"--advertise must be host:port; got {said or listen!r}")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listener(args: argparse.Namespace) -> tuple[str, grpc.ServerCredentials | None]:
    """The address as gRPC writes it, and its TLS. Raises OSError or ValueError."""
    if bool(args.tls_cert) != bool(args.tls_key) or (args.client_ca and not args.tls_cert):
        raise ValueError("--tls-cert and --tls-key belong together, and --client-ca needs both")
    tls = server_credentials(args.tls_cert, args.tls_key, args.client_ca) if args.tls_cert else None
    if args.access and not (tls or args.insecure) and reached_by_others(args.listen):
        raise ValueError(
            f"--access needs --tls-cert and --tls-key where --listen {args.listen} can be reached from other machines: "
            "without TLS nobody can show who they are"
        )
    return args.listen if args.listen.startswith("unix:") else bindable(args.listen), tls


def everybody_may_change(args: argparse.Namespace) -> bool:
    """Whether callers of other hosts, whom nobody asks who they are, may do everything: all have a certificate of the
    CA, or the flag says so."""
    return bool(args.insecure or args.client_ca)


def access_notice(args: argparse.Namespace) -> str:
    """The rights of strangers on the network, for the log and the status page; empty where there are none, or where all
    must show who they are. Raises ValueError."""
    if args.access or args.client_ca or not reached_by_others(args.listen):
        return ""
    if args.insecure:
        return f"Everybody who reaches {args.listen} may change everything (--insecure)."
    return (
        f"Everybody who reaches {args.listen} may read, and connect engines. What changes anything is taken from this "
        "host only, until --access FILE or --client-ca FILE, both with --tls-cert and --tls-key, says who may, or "
        "--insecure lets everybody."
    )


def reached_by_others(listen: str) -> bool:
    """Whether other machines can reach an address to listen on. Raises ValueError."""
    return not listen.startswith("unix:") and not _loopback(split_address(listen)[0])


def _loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def page_address(args: argparse.Namespace) -> tuple[str, int]:
    """Host and port of the status page. Raises ValueError."""
    host, port = split_address(args.page_listen)
    if not (args.insecure or _loopback(host)):
        raise ValueError(
            f"--page-listen {args.page_listen} would show the fleet to whoever reaches it: put a proxy that asks who "
            f"they are in front of 127.0.0.1:{port}, or give --insecure where the network is trusted"
        )
    return host, port
