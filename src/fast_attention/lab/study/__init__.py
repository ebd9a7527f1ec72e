"""``fast-attention study``: what several mechanisms learn of one task, and its cost in time and memory."""
