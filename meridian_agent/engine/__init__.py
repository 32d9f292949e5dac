"""Runs the agent in the engine core: does the agent's work at each hook of vLLM's scheduler. Calls vLLM through
`vllm_adapter` only."""
