"""Reformer's attention among tokens whose hashes meet."""
