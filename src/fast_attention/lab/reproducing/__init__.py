"""``fast-attention reproduce``: a paper's figure or table measured here, its numbers beside ours."""
