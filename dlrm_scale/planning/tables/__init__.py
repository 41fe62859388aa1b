"""Sets of tables with what a cost model needs to know of their lookups."""
