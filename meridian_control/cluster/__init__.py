"""Makes several replicas act as one: tracks the live replicas, elects a leader, and asks the other replicas. The
package knows the fleet, but not the gRPC services."""
