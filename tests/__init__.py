"""What make test runs: oracles, laws, seeded faults and the tests of each part."""
