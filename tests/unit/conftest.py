"""Hypothesis without its time limits, which would measure the machine when the machine is busy."""

from hypothesis import HealthCheck, settings

settings.register_profile("meridian", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("meridian")
