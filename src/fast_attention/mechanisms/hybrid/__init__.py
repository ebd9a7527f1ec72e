"""Mechanisms made of mechanisms: near keys by a window, far ones by features; few keys by one, many by another."""
