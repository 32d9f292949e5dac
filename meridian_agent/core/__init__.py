"""Holds the agent's knowledge of requests and its own decisions about them. Knows no vLLM, no gRPC stream and no
thread."""
