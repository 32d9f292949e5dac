"""What the agent knows of requests, and what it decides about them. Knows no vLLM, no gRPC stream and no thread."""
