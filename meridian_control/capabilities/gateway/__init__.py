"""Gateways name the tenant and the SLO class of requests; the policy says which SLO classes clients may choose."""
