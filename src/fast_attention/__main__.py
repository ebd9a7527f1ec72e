"""``python -m fast_attention``: the command line, for ``torchrun -m`` too."""

from fast_attention.cli import main

if __name__ == "__main__":
    main()
