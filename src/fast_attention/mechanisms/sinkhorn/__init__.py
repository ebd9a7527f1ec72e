"""Sinkhorn attention and SortCut: softmax over blocks that are sorted by what they hold."""
