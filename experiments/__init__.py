"""Experiments with small models: tasks, training, studies and generation. Run from a checkout; see README.md here."""
