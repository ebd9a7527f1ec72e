"""``fast-attention convert``: a pretrained model's attention made fast, with a report."""
