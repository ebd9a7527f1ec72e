"""Trains a model on a task: the loop, checkpoints that are whole or absent, resuming, several processes."""
