"""Loops over parts: co-shards and gradient accumulation, where memory binds."""
