"""The worker role: measures the sampled rows of logits that the engine core asks for."""
