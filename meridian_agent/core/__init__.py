"""Holds what the agent knows about requests, and applies the control plane's decisions to them. Knows no vLLM, no gRPC
stream and no thread."""
