"""Biases: what scores of windows and of exact attention gain by the distance of query and key, as a setting."""
