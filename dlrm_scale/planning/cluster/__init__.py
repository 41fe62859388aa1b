"""Clusters: ranks, memory, and what collectives and lookups cost on them."""
