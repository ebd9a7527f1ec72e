"""``fast-attention maps``: attention maps of a model's heads before and after a swap."""
