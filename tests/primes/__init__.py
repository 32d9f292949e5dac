"""A capability that is not part of the product: it ends thinking at a prime number of tokens."""
