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
from meridian_control.limits import Limits
from meridian_control.replicas import own_host
from meridian_control.tls import server_credentials

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
    p.add_argument("--access", type=Path, help="file that says who may do what; read again when it changes")
    p.add_argument("--insecure", action="store_true", help="allow what strangers on the network could use")
    p.add_argument("--max-engines", type=int, default=Limits.engines, help="engines connected at once, at most")
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
    return f"{host or '[::]'}:{port}"


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
    if args.listen.startswith("unix:"):
        return args.listen, tls
    host, port = split_address(args.listen)
    known = args.client_ca or args.access
    if not (args.insecure or _loopback(host) or (tls and known)):
        missing = "asks nobody who they are: give --client-ca or --access"
        raise ValueError(
            f"--listen {args.listen} can be reached from other machines and "
            f"{missing if tls else 'has no TLS: give --tls-cert and --tls-key'}, "
            f"or --insecure where the network is trusted; --listen 127.0.0.1:{port} is for this machine only"
        )
    return bindable(args.listen), tls


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
