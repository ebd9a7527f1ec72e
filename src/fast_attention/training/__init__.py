"""Trains a model on a task: the loop, checkpoints, resuming, several processes."""
