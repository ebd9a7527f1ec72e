"""``fast-attention advise``: what to use at one length, measured here; exact attention may be the answer."""
