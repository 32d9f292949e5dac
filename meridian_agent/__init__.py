"""The agent: observes and obeys inside a vLLM process. Never imports the control plane."""

__version__ = "0.1.0"
