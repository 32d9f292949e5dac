"""The demonstration: a real engine and a real control plane under load, and one policy change in the middle."""
