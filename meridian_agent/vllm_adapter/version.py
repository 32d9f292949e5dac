"""Reads the version of the installed vLLM and checks whether this vLLM can host the agent."""

from __future__ import annotations

import vllm

from meridian_agent.vllm_adapter import required_api

# First and last supported minor release: for each release between them the hooked code was read, and either the tests
# were run or the sources were compared.
SUPPORTED = ((0, 26), (0, 33))


class Unsupported(RuntimeError):  # noqa: N818
    """This vLLM cannot host the agent; the message says why."""


def vllm_version() -> str:
    return str(vllm.__version__)


def minor() -> tuple[int, int]:
    """Return the first two numbers of vLLM's version; zeros if it has none, such as "dev"."""
    first, _, rest = vllm_version().partition(".")
    second = rest.partition("+")[0].partition(".")[0]
    return (int(first), int(second)) if first.isdecimal() and second.isdecimal() else (0, 0)


def unfit() -> str:
    """Return the reason why this vLLM cannot host the agent: its version, or every hook that it lacks; empty if it can
    host the agent."""
    low, high = SUPPORTED
    if not low <= minor() <= high:
        return f"vLLM {vllm_version()} is outside the supported {low[0]}.{low[1]} to {high[0]}.{high[1]}"
    return _lacks(required_api.ENGINE)


def unfit_worker(v2_runner: bool) -> str:
    """Return what this vLLM lacks for measuring in a worker; empty if nothing is missing. v2_runner: the worker uses
    Model Runner V2 instead of V1."""
    return _lacks(required_api.V2_RUNNER if v2_runner else required_api.V1_RUNNER)


def unfit_probe_rows(v2_runner: bool) -> str:
    """Return what this vLLM lacks for EAT probes that are rows of the probed requests; empty if nothing is missing.
    v2_runner: the worker uses Model Runner V2 instead of V1."""
    runner = required_api.V2_PROBE_ROWS if v2_runner else required_api.V1_PROBE_ROWS
    return _older(required_api.PROBE_ROWS_FROM) or _lacks(required_api.PROBE_ROWS | runner)


def unfit_premature_stops() -> str:
    """Return what this vLLM lacks for requests that go on after they have stopped while they think; empty if nothing is
    missing."""
    return _older(required_api.PREMATURE_STOPS_FROM) or _lacks(required_api.PREMATURE_STOPS)


def unfit_limit(name: str) -> str:
    """Return what this vLLM lacks for changing a limit of its scheduler; empty if nothing is missing."""
    return _lacks(required_api.LIMITS[name])


def unfit_preemption() -> str:
    """Return what this vLLM lacks for preemptions by the agent; empty if nothing is missing."""
    return _lacks(required_api.PREEMPTION)


def _older(first: tuple[int, int]) -> str:
    """Return that this vLLM is older than a release, if it is."""
    return f"vLLM {vllm_version()} is older than {first[0]}.{first[1]}" if minor() < first else ""


def _lacks(table: required_api.Table) -> str:
    """Return which entries of a table this vLLM lacks; empty if nothing is missing."""
    lacks = required_api.missing(required_api.Imported(), table)
    return f"vLLM {vllm_version()} lacks: {', '.join(lacks)}" if lacks else ""
