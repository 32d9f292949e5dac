"""Decides who may call what and how much, and records it. Knows no service."""
