"""Holds the program `meridian-control`: it reads the flags, makes every part once, and runs the parts.

No other package imports this package.
"""
