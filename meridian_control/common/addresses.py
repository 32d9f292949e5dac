"""Splits the addresses on which the control plane's programs listen, and checks those that they connect to. Pure."""

import ipaddress

# Schemes of gRPC's addresses that need not end with a port.
SCHEMES = ("unix:", "unix-abstract:", "dns:", "ipv4:", "ipv6:", "xds:")


def is_target(address: str) -> bool:
    """Whether gRPC can connect to an address: host:port, or an address with a scheme that gRPC knows."""
    if address.startswith(SCHEMES):
        return True
    host, _, port = address.rpartition(":")
    plain = host.startswith("[") == host.endswith("]") == (":" in host) and not set("/ @") & set(host)
    return bool(host) and plain and port.isdecimal() and len(port) <= 5 and 0 < int(port) <= 65535


def split_address(address: str) -> tuple[str, int]:
    """Split `host:port` or `:port` into host and port. Raises ValueError."""
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"an address must be host:port or :port; got {address!r}")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Return whether a name or an IP address stands for this machine and only programs on it can reach it."""
    return host == "localhost" or is_loopback_address(host)


def is_loopback_address(text: str) -> bool:
    """Return whether a text is an IP address that only programs on this machine can reach."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def flag_address(flag: str, address: str) -> tuple[str, int]:
    """Split the address that a flag gives into host and port. Raises ValueError, which names the flag."""
    try:
        return split_address(address)
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from error
