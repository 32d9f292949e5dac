"""The control plane: decides for a fleet of vLLM engines. Never imports vLLM, torch or the agent."""

__version__ = "0.1.0"
