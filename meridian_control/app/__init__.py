"""The composition root of `meridian-control`: reads the flags, makes every part once, and runs them.

No other package imports it.
"""
