"""Smaller and exported forms of a model."""
