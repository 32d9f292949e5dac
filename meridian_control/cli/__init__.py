"""Implements `meridianctl`, with one module for each group of commands.

The package uses the control plane only through its gRPC API. The package imports neither the database nor the server.
"""
