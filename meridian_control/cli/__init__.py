"""`meridianctl`: one module for each group of commands.

Knows the control plane through its gRPC API only: no database, no server.
"""
