"""Scheduling: who owns which memory, and when work runs."""
