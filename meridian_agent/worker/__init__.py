"""The worker role of the agent: it measures the sampled rows of logits that the engine core asks for."""
