"""Mutations that break each guarantee of the README on purpose, and the tests that fail under each."""
