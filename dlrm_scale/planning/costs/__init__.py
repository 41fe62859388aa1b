"""From tables and a cluster to options with costs, and from a whole plan to a predicted step."""
