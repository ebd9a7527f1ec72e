"""Exact speed-ups: ``swap(model)`` computes what the layers of a model compute, windows as windows, without padding."""
