"""Tests of biases: what scores gain by positions."""
