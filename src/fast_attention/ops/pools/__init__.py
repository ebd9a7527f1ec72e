"""Softmax pools channel by channel: AFT with and without biases."""
