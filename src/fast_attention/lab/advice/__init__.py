"""``fast-attention advise``: what to use at one length, measured here and now, exact attention among the answers."""
