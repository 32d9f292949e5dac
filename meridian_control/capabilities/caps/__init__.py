"""Caps: the most thinking tokens that a request may have, which the agent enforces to the token."""
