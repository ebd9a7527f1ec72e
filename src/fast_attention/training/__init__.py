"""Training that loses nothing: a loop over a task's batches, checkpoints that are whole or absent, signals heeded."""
