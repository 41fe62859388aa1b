"""Measuring a machine (calibration) and plans on it."""
