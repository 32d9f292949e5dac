"""Gives every channel that the control plane's programs open the same attitude to proxies and to silence.

gRPC would send a channel through the proxies of `http_proxy` and `https_proxy`, even to this host. Those variables are
meant for other programs, so a channel uses a proxy only if MERIDIAN_PROXY names one.
"""

from __future__ import annotations

from typing import Any

from meridian_control.common.addresses import is_target
from meridian_control.common.environment import BadVariable, read

# Option of a channel that uses no proxy.
NO_PROXY: tuple[str, Any] = ("grpc.enable_http_proxy", 0)
# Options of a channel that ends its calls within two minutes once the other side or the network is silent. Where only
# the other side sends, gRPC pings it no more than once a minute.
KEEPALIVE: list[tuple[str, Any]] = [("grpc.keepalive_time_ms", 30_000), ("grpc.keepalive_timeout_ms", 15_000)]


def proxy_option() -> tuple[str, Any]:
    """Return the channel option for the proxy that MERIDIAN_PROXY names, or for none. Raises BadVariable."""
    said = read("MERIDIAN_PROXY")
    if not said:
        return NO_PROXY
    host = said.removeprefix("http://").rstrip("/").rpartition("@")[2]
    if not said.startswith("http://") or not is_target(host):
        raise BadVariable("MERIDIAN_PROXY", said, "a URL http://host:port")
    return ("grpc.http_proxy", said)
