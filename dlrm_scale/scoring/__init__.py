"""Evaluates and predicts with a trained model."""
