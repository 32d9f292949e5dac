"""The live requests of one engine as columns, which rules read. The package does no I/O and knows no rule."""
