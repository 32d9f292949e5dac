"""vLLM's own tests of its scheduler and KV connectors, run with the agent in front and without it."""
