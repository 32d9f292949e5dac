"""Finds out who this engine is and where its control planes are, from the environment and the host."""

from __future__ import annotations

import platform
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meridian_agent import __version__
from meridian_agent.core.hand_overs import MAX_URL
from meridian_agent.core.plain_log import UNPRINTABLE
from meridian_agent.core.request_info import MAX_TEXT, clean
from meridian_agent.link.environment import complain, read
from meridian_agent.link.sender_settings import request_sources

if TYPE_CHECKING:
    from collections.abc import Iterator

# Largest number of characters of all labels together.
MAX_LABELS = 65_536
# Schemes of gRPC's addresses that need not end with a port.
SCHEMES = ("unix:", "unix-abstract:", "dns:", "ipv4:", "ipv6:", "xds:")
# File with the namespace of the pod in which this process runs.
NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def targets() -> list[str]:
    """Return the addresses in MERIDIAN_CONTROL that can be used. All others are logged."""
    said = [part.strip() for part in read("MERIDIAN_CONTROL").split(",") if part.strip()]
    for bad in (part for part in said if not is_address(part)):
        complain("MERIDIAN_CONTROL", bad, "no address host:port; it is left out")
    return [part for part in said if is_address(part)]


def is_address(text: str) -> bool:
    """Return whether gRPC can connect to an address: host:port, or an address with a scheme that gRPC knows."""
    if UNPRINTABLE.search(text):
        return False
    if text.startswith(SCHEMES):
        return True
    host, _, port = text.rpartition(":")
    plain = host.startswith("[") == host.endswith("]") == (":" in host) and not set("/ @") & set(host)
    return bool(host) and plain and port.isdecimal() and len(port) <= 5 and 0 < int(port) <= 65535


def rank_of(parallel_config: Any) -> int:
    """Return the engine's number among the data-parallel engines; for a dense model vLLM sets the index only, not the
    rank."""
    return int(getattr(parallel_config, "data_parallel_index", 0) or getattr(parallel_config, "data_parallel_rank", 0))


def wanted_name(data_parallel_rank: int = 0) -> tuple[str, bool]:
    """Return the name that this engine should have, and whether MERIDIAN_ENGINE_ID gives it.

    By default the name is the host's; in a Kubernetes pod, which shares its host's name with pods of other namespaces,
    the namespace follows after a dot. Data-parallel ranks after the first have their rank in their name.
    """
    said = read("MERIDIAN_ENGINE_ID")
    chosen = clean(said)
    # Bytes that are not UTF-8 fit into no message, and `clean` has escaped them.
    written = said.encode("utf-8", "backslashreplace").decode()
    if len(said) > MAX_TEXT or not written.isprintable():
        complain("MERIDIAN_ENGINE_ID", said, f"not {MAX_TEXT} printable characters at most; the host's name is used")
        chosen = ""
    name = chosen or ".".join((platform.node() or "engine", *_namespace()))
    return name + (f"-dp{data_parallel_rank}" if data_parallel_rank else ""), bool(chosen)


def _namespace() -> Iterator[str]:
    try:
        yield NAMESPACE.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return


def identity_of_engine(vllm_version: str, name: str) -> dict[str, Any]:
    """Return the fields of Hello that identify this engine; every start of the engine is a new incarnation."""
    return {
        "engine_id": name,
        "incarnation": uuid.uuid4().hex,
        "agent_version": __version__,
        "vllm_version": vllm_version,
        "labels": _labels(),
        "url": _url(),
        "request_sources": str(request_sources()),
    }


def _labels() -> dict[str, str]:
    # Bytes that are not UTF-8 would not fit into a message.
    labels: dict[str, str] = {}
    for part in filter(None, map(str.strip, clean(read("MERIDIAN_LABELS"), MAX_LABELS).split(","))):
        key, separator, value = (piece.strip() for piece in part.partition("="))
        if not separator or not key:
            complain("MERIDIAN_LABELS", part, "no label key=value; it is left out")
            continue
        if labels.get(key, value) != value:
            complain("MERIDIAN_LABELS", part, f"the label has the value {labels[key]!a} too; the last one counts")
        labels[key] = value
    return labels


def _url() -> str:
    said = read("MERIDIAN_URL").rstrip("/")
    scheme, _, rest = said.partition("://")
    plain = len(said) <= MAX_URL and " " not in said and not UNPRINTABLE.search(said)
    if said and not (scheme in {"http", "https"} and rest and plain):
        complain("MERIDIAN_URL", said, "no URL such as http://host:port; the engine takes no handovers")
        return ""
    return said
