"""The read-only page over HTTP. Reads what the gRPC services say, and changes nothing."""
