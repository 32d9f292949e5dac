"""Several replicas as one: who lives, who leads, and what the other replicas say. Knows the fleet, not the services."""
