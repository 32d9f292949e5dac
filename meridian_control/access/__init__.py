"""Who may call what, how much, and what is kept of it. Knows no service."""
