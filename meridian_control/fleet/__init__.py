"""All engines of one replica: their sessions, what is recorded of them, and their freezes. Knows no gRPC service."""
