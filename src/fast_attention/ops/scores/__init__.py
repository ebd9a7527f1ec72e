"""Attention whose scores cover all keys: exact, synthesised, rectified, to slots, to sorted blocks."""
