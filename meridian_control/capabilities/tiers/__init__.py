"""Eviction tiers: KV blocks that no later prompt can use are given up first."""
