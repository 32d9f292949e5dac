"""The read-only status page over HTTP. The page shows the same data as the gRPC services, and changes nothing."""
