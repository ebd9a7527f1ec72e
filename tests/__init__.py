"""What make test-all runs: oracles, laws, seeded faults, and a room of tests for each room of the source."""
