"""The memory a run will take, whether it is there, and what it took."""
