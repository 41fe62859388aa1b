"""Raw input to a dataset, in two passes that survive a kill."""
