"""``fast-attention bench``: every mechanism near the machine's limits, beside exact attention and beside its peers."""
