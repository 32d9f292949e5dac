"""Run vLLM's own tests of its scheduler and KV connectors, with the agent in front and without it."""
