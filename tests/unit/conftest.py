"""Hypothesis without its clocks: on a busy machine they measure the machine."""

from hypothesis import HealthCheck, settings

settings.register_profile("meridian", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("meridian")
