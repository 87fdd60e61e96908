"""Tiers: the memory in which a rank's shard lies, and the shard over it."""
