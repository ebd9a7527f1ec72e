"""Inputs drawn at random, seeded and bounded in `make test-all`; `make fuzz MINUTES=30` continues with new seeds."""
