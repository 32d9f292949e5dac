"""Serves /metrics for the programs of the control plane."""

from __future__ import annotations

from prometheus_client import disable_created_metrics, start_http_server

from meridian_control.common.addresses import flag_address


def serve_metrics(address: str) -> None:
    """Serve /metrics on a thread of its own, unless the address is empty. Raises OSError or ValueError, which name the
    flag --metrics-listen."""
    if not address:
        return
    disable_created_metrics()  # type: ignore[no-untyped-call]
    host, port = flag_address("--metrics-listen", address)
    try:
        start_http_server(port, host or "0.0.0.0")
    except OSError as error:
        raise OSError(f"--metrics-listen: cannot listen on {address}: {error.strerror}") from error
