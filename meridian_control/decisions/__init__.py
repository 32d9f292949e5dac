"""Holds the rules, as pure functions of the policy and of the table of live requests. The package does no I/O."""
