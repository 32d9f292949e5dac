"""Shortens the thinking of an engine's requests while they miss targets that people feel, and restores it once there is
room. The package knows no session and no gRPC, and does no I/O."""
