"""Feature maps: what linear attention puts in place of the softmax's exponential."""
