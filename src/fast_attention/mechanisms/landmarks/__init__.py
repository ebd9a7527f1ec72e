"""Attention by way of a few tokens that stand for all: landmarks, agents, and slots that are written to."""
