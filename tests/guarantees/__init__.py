"""The guarantees of the README, each broken on purpose at least once, and the tests that fail then."""
