"""The control plane: decides for a fleet of vLLM engines. Never imports vLLM, torch or the agent.

`from meridian_control import MeridianConfig, load_config` gives the policy schema and its reader to other programs:
`load_config(path)` reads a `meridian.toml` and raises PolicyError, a ValueError that names every bad field by its
dotted path with the value it has, and the file where it cannot be read.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meridian_control.common.errors import PolicyError
    from meridian_control.policy.formats import load as load_config
    from meridian_control.policy.model import Policy as MeridianConfig

__version__ = "0.1.0"
__all__ = ["MeridianConfig", "PolicyError", "load_config"]


def __getattr__(name: str) -> Any:
    """The names above, imported when they are asked for: without them the package needs none of its dependencies."""
    if name == "MeridianConfig":
        from meridian_control.policy.model import Policy

        return Policy
    if name == "load_config":
        from meridian_control.policy.formats import load

        return load
    if name == "PolicyError":
        from meridian_control.common.errors import PolicyError

        return PolicyError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
