"""Softmax over some of the pairs: windows, blocks and BigBird's pattern."""
