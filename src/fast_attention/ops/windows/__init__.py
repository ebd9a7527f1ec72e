"""Softmax inside windows and over gathered blocks, in tiles that stay in cache."""
