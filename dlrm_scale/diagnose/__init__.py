"""Runs a training in short differential trials and says what holds it up."""
