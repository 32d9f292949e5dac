"""Defines the flags of `meridian-control` and checks their addresses, certificates and access rights.

The module reads TLS files and does no other I/O, and does not know the services behind the addresses.
"""

from __future__ import annotations

import argparse
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from meridian_control import __version__
from meridian_control.common import logs
from meridian_control.common.addresses import flag_address, is_loopback, split_address
from meridian_control.common.environment import BadVariable, choice, read
from meridian_control.common.http_listener import host_name
from meridian_control.fleet.fleet import HEARTBEAT_S
from meridian_control.fleet.membership import own_host
from meridian_control.fleet.memory import MemoryLimits
from meridian_control.server.rate_limits import CallLimits
from meridian_control.server.server_tls import server_credentials

if TYPE_CHECKING:
    from collections.abc import Callable

    import grpc


# Variable of earlier versions, and what to use instead of it.
METRICS_ENDPOINT = "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"
# Longest name of a link on the status page.
LONGEST_LINK_NAME = 40
SCRAPE = "let the OpenTelemetry collector scrape /metrics (its Prometheus receiver)"


def file(text: str) -> Path:
    """Return the path in a flag. An empty path would be the working directory."""
    if not text.strip():
        raise argparse.ArgumentTypeError("must not be empty")
    return Path(text)


def _number(kind: type, is_meant: Callable[[Any], bool], must: str) -> Callable[[str], Any]:
    """Return the type of a flag with a number of which `is_meant` holds. must: what the number must be."""

    def read_number(text: str) -> Any:
        with suppress(ValueError):
            if is_meant(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"must be {must}; got {text!r}")

    return read_number


share = _number(float, lambda value: 0 <= value <= 1, "from 0 to 1")
count = _number(int, lambda value: value >= 1, "a whole number, at least 1")
seconds = _number(float, lambda value: value == 0 or 0.1 <= value <= 3600, "0, or from 0.1 to 3600 seconds")


def page_link(text: str) -> tuple[str, str]:
    """Return name and URL of a link on the status page. Raises ArgumentTypeError."""
    name, separator, url = (part.strip() for part in text.partition("="))
    if not (name and separator and name.isprintable() and len(name) <= LONGEST_LINK_NAME):
        raise argparse.ArgumentTypeError(
            f"must be NAME=URL with a name of at most {LONGEST_LINK_NAME} characters; got {text!r}"
        )
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 0) >= 0
    except ValueError:
        is_usable = False
    if not is_usable or not url.isprintable() or " " in url:
        raise argparse.ArgumentTypeError(f"the URL of {name} must be http://HOST… or https://HOST…; got {url!r}")
    if parts.username is not None or parts.password is not None:
        raise argparse.ArgumentTypeError(f"the URL of {name} must have no user and no password: every viewer sees it")
    return name, url


def page_links(args: argparse.Namespace) -> dict[str, str]:
    """Return the links on the status page by their names. Raises ValueError for a name that is given twice."""
    names = [name for name, _ in args.page_link]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"--page-link {name}=… is given {names.count(name)} times; each link needs its own name")
    return dict(args.page_link)


class Removed(argparse.Action):
    """A flag of earlier versions: its use is an error that names what to use instead."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        parser.error(f"{self.option_strings[0]} is gone: {SCRAPE}")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the flags. Raises BadVariable for a default that an environment variable gives."""
    if endpoint := read(METRICS_ENDPOINT):
        raise BadVariable(METRICS_ENDPOINT, endpoint, f"unset, because no metrics are sent: {SCRAPE}")
    p = argparse.ArgumentParser(prog="meridian-control", description="The control plane for reasoning models on vLLM.")
    _add_server(p)
    _add_engines(p)
    _add_policy(p)
    _add_pages(p)
    _add_records(p)
    logs.add_flags(p, choice(logs.VARIABLE, "text", logs.FORMATS))
    p.add_argument("--version", action="version", version=__version__)
    return p


def _add_server(p: argparse.ArgumentParser) -> None:
    group = p.add_argument_group("server and access")
    group.add_argument(
        "--listen", default="127.0.0.1:50051", help="address of the gRPC server: host:port, :port for all, unix:PATH"
    )
    group.add_argument("--tls-cert", type=file, help="PEM certificate chain of the server; read again when it changes")
    group.add_argument("--tls-key", type=file, help="PEM key of the server's certificate")
    group.add_argument(
        "--client-ca",
        type=file,
        help="PEM certificates of the CA that must have signed each client's certificate, even if a client has a token",
    )
    group.add_argument(
        "--access",
        type=file,
        help="file that assigns roles to callers; read again when it changes. Without this file and --client-ca, the "
        "control plane accepts changes from this host only, unless --insecure is given",
    )
    group.add_argument(
        "--insecure",
        action="store_true",
        help="let every caller that reaches --listen change everything, or with --access what its role allows, also "
        "without TLS; and allow any address for --page-listen",
    )
    group.add_argument(
        "--health-listen", default="", help="address that serves gRPC health alone, without TLS, for probes"
    )


def _add_engines(p: argparse.ArgumentParser) -> None:
    group = p.add_argument_group("engines")
    group.add_argument(
        "--max-engines",
        type=count,
        default=CallLimits.engines,
        help="largest number of engines connected to this replica",
    )
    group.add_argument(
        "--heartbeat",
        type=seconds,
        default=HEARTBEAT_S,
        metavar="SECONDS",
        help="seconds without a message after which an agent sends a heartbeat, which is answered; less than the idle "
        "timeout of any proxy between agents and control plane; 0 for none",
    )
    group.add_argument(
        "--max-engines-per-caller",
        type=count,
        help="largest number of engines of one principal, or of one host without authentication, connected to this "
        "replica; default: half of --max-engines",
    )
    for name, default, whose in (
        ("--max-stream-mib", MemoryLimits.stream, "one engine"),
        ("--max-caller-mib", MemoryLimits.caller, "one caller's engines"),
        ("--max-engines-mib", MemoryLimits.all, "all engines"),
    ):
        help_text = f"most memory in MiB for the requests of {whose} on this replica; default: %(default)s"
        group.add_argument(name, type=count, default=default >> 20, help=help_text)


def _add_policy(p: argparse.ArgumentParser) -> None:
    group = p.add_argument_group("policy and replicas")
    files = group.add_mutually_exclusive_group()
    files.add_argument(
        "--policy", type=file, help="policy file for an empty store; default: ./meridian.toml, then the user's file"
    )
    files.add_argument("--policy-dir", type=file, help="directory whose meridian.toml is put in force at each change")
    group.add_argument(
        "--store",
        default=read("MERIDIAN_STORE") or "meridian.db",
        help="store of the policy revisions: a SQLite file, or postgresql://… for several replicas; default: "
        "MERIDIAN_STORE, else meridian.db",
    )
    group.add_argument(
        "--advertise",
        help="host:port at which other replicas reach this one; default: --listen with the host's own address",
    )


def _add_pages(p: argparse.ArgumentParser) -> None:
    group = p.add_argument_group("metrics and status page")
    group.add_argument("--metrics-listen", default="127.0.0.1:9464", help="address of /metrics; empty switches it off")
    group.add_argument(
        "--page-listen", default="127.0.0.1:9465", help="address of the status page; empty switches it off"
    )
    group.add_argument(
        "--page-link",
        action="append",
        type=page_link,
        default=[],
        metavar="NAME=URL",
        help="link on the status page, for example Grafana=https://grafana.example/dashboards or "
        "Runbooks=https://wiki.example/meridian; repeatable",
    )
    group.add_argument(
        "--allow-host",
        action="append",
        type=host_name,
        default=[],
        metavar="NAME",
        help="further host name under which /metrics and the status page may be asked, such as a proxy's; repeatable",
    )


def _add_records(p: argparse.ArgumentParser) -> None:
    group = p.add_argument_group("decision log and traces")
    group.add_argument(
        "--decision-log", type=file, help="rotated JSON lines file for decisions and their outcomes; default: none"
    )
    group.add_argument(
        "--otlp-endpoint",
        default=read("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or read("OTEL_EXPORTER_OTLP_ENDPOINT"),
        help="gRPC endpoint that gets requests as OpenTelemetry traces; default: none",
    )
    group.add_argument(
        "--trace-ratio", type=share, default=0.01, help="share of the requests without a trace context that are traced"
    )
    for flag in ("--otlp-metrics-endpoint", "--otlp-metrics-interval"):
        group.add_argument(flag, action=Removed, help=argparse.SUPPRESS)


def engine_limits(args: argparse.Namespace) -> CallLimits:
    """Return the limits on calls."""
    of_caller = args.max_engines_per_caller or max(1, args.max_engines // 2)
    return CallLimits(engines=args.max_engines, engines_of_caller=of_caller)


def memory_limits(args: argparse.Namespace) -> MemoryLimits:
    """Return the bounds of the memory that sessions take."""
    return MemoryLimits(args.max_stream_mib << 20, args.max_caller_mib << 20, args.max_engines_mib << 20)


def bindable(address: str) -> str:
    """Return the address in the form in which gRPC binds it. Raises ValueError."""
    host, port = split_address(address)
    host = host or "::"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def advertised(said: str | None, listen: str) -> str:
    """Return the address at which other replicas reach this one. Raises ValueError."""
    if not said and listen.startswith("unix:"):
        raise ValueError(f"other replicas cannot reach --listen {listen}: give --advertise, or a SQLite --store")
    host, port = flag_address("--advertise", said or listen)
    if not said and host in ("", "::", "0.0.0.0"):
        host = own_host()
    if not host or not port:
        raise ValueError(f"--advertise must be host:port; got {said or listen!r}")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listener(
    args: argparse.Namespace, begun: Callable[[], object] = lambda: None
) -> tuple[str, grpc.ServerCredentials | None]:
    """Return the address to listen on, as gRPC binds it, and its TLS credentials. begun: called on gRPC's threads
    before each TLS handshake. Raises OSError or ValueError."""
    if bool(args.tls_cert) != bool(args.tls_key) or (args.client_ca and not args.tls_cert):
        raise ValueError("--tls-cert and --tls-key belong together, and --client-ca needs both")
    tls = server_credentials(args.tls_cert, args.tls_key, args.client_ca, begun) if args.tls_cert else None
    if args.access and not (tls or args.insecure) and reached_by_others(args.listen):
        raise ValueError(
            f"--access needs --tls-cert and --tls-key if other machines can reach --listen {args.listen}: "
            "without TLS callers cannot prove who they are"
        )
    return args.listen if args.listen.startswith("unix:") else bindable(args.listen), tls


def everybody_may_change(args: argparse.Namespace) -> bool:
    """Whether callers on other hosts may change everything without an access file.

    Callers may do so if all callers must have a certificate of the CA, or if `--insecure` is given.
    """
    return bool(args.insecure or args.client_ca)


def access_notice(args: argparse.Namespace) -> str:
    """Describe the rights of unknown callers on the network, for the log and the status page. Raises ValueError.

    The text is empty if other machines cannot reach the server, or if all callers must prove who they are.
    """
    if args.access or args.client_ca or not reached_by_others(args.listen):
        return ""
    if args.insecure:
        return f"Every caller that reaches {args.listen} may change everything (--insecure)."
    return (
        f"Every caller that reaches {args.listen} may read, and connect engines. Changes are accepted from this host "
        "only. To accept changes from other hosts, give --access FILE or --client-ca FILE, both with --tls-cert and "
        "--tls-key, or give --insecure."
    )


def reached_by_others(listen: str) -> bool:
    """Whether other machines can reach a server that listens on this address. Raises ValueError."""
    return not listen.startswith("unix:") and not is_loopback(split_address(listen)[0])


def page_address(args: argparse.Namespace) -> tuple[str, int]:
    """Return host and port of the status page. Raises ValueError."""
    host, port = split_address(args.page_listen)
    if not (args.insecure or is_loopback(host)):
        raise ValueError(
            f"--page-listen {args.page_listen} would show the fleet to every caller that reaches the address: put an "
            f"authenticating proxy in front of 127.0.0.1:{port}, or give --insecure if the network is trusted"
        )
    return host, port
