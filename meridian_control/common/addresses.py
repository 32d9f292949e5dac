"""Splits the addresses that the programs of the control plane listen on. Pure."""

import ipaddress


def split_address(address: str) -> tuple[str, int]:
    """Split `host:port` or `:port` into host and port. Raises ValueError."""
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"an address must be host:port or :port; got {address!r}")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Return whether a name or an IP address stands for this machine and only programs on it can reach it."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def flag_address(flag: str, address: str) -> tuple[str, int]:
    """Split the address that a flag gives into host and port. Raises ValueError, which names the flag."""
    try:
        return split_address(address)
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from error
