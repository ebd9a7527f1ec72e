"""Training that loses nothing: a loop over a task's batches, checkpoints that are whole or not at all, signals heeded."""
