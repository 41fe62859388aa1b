"""Counting category ids on disk and in memory, and the vocabularies made from the counts."""
