"""The agent runs inside a vLLM process: it reports what the engine does and carries out the control plane's decisions.
The agent never imports the control plane."""

__version__ = "0.3.0"
