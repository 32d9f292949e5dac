"""The rule that ends thinking which repeats itself."""
