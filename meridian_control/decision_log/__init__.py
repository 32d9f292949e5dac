"""Why each request was treated as it was: every decision with the values its rule saw. Knows no session."""
