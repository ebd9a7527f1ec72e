"""Runs the command line as ``python -m fast_attention``, where the command itself is not on the path."""

from fast_attention.cli import main

if __name__ == "__main__":
    main()
