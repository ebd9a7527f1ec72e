"""``fast-attention study``: what several mechanisms learn of one task, at what price in time and memory."""
