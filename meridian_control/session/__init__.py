"""One engine's stream: what the engine reported, what was decided, and what the engine was told. Does no I/O."""
