"""``fast-attention bench``: every mechanism beside the machine's limits, exact attention and its peers."""
