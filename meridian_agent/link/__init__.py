"""Connects the engine to its control plane: the stream and its thread, the lease, and the queues between the engine's
thread and the stream. Knows no vLLM."""
