"""The policy's schema, file formats and store. The package knows no engine and no decision rule."""
