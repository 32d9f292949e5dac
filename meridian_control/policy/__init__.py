"""The policy: its schema, its forms, its store. Knows no engine and no rule."""
