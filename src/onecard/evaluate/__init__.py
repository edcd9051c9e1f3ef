"""Measuring a model on text it has not seen."""
