"""Tests of upgrades: the previous version and this one side by side (`make test-upgrade`)."""
