"""Collectives: the world of ranks, the control exchange, and the exchange of rows."""
