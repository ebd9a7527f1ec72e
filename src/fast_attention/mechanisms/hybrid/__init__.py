"""Mechanisms made of mechanisms: near keys by blocks, far ones by features; few keys by one, many by another."""
