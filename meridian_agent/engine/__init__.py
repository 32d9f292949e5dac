"""The engine-core role: what happens at each hook of vLLM's scheduler. Asks vLLM through `vllm_adapter` only."""
