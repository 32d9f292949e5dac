"""Holds the control plane's side of an engine's stream: reports come in, decisions go out. The package does no I/O."""
