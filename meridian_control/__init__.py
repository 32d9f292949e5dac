"""The control plane takes decisions for a fleet of vLLM engines. The package never imports vLLM, torch or the agent.

Other programs read a policy file with `from meridian_control import MeridianConfig, load_config`. `load_config(path)`
reads a `meridian.toml` and raises PolicyError for a policy that it cannot use. PolicyError is a ValueError that names
every bad field by its dotted path and value, or the file if the file cannot be read.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meridian_control.common.errors import PolicyError
    from meridian_control.policy.formats import load_config
    from meridian_control.policy.model import Policy as MeridianConfig

__version__ = "0.3.0"
__all__ = ["MeridianConfig", "PolicyError", "load_config"]


def __getattr__(name: str) -> Any:
    """Import a name in `__all__` at its first use, so that importing the package loads none of its dependencies."""
    if name == "MeridianConfig":
        from meridian_control.policy.model import Policy

        return Policy
    if name == "load_config":
        from meridian_control.policy.formats import load_config

        return load_config
    if name == "PolicyError":
        from meridian_control.common.errors import PolicyError

        return PolicyError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
