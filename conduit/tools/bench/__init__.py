"""Benchmarks: each part beside its floor, and beside peers where they are installed."""
