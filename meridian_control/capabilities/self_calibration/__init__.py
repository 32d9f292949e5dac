"""Finds, proves and withdraws EAT rules by itself, for each model and SLO class whose policy asks for it."""
