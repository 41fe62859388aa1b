"""Sharding plans: describe tables and a cluster, predict, solve, explain, measure."""
