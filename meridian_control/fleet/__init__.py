"""All engines of one replica, their recordings and freezes, and all replicas as one. Knows no gRPC service."""
