"""Plans and measurements as pages and tables."""
