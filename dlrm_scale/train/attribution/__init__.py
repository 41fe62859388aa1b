"""Where a step's time went."""
