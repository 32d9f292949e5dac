"""The stream to the control plane: its thread, its lease, and what waits on either side of it. Knows no vLLM."""
