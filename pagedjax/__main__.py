"""``python -m pagedjax`` is the ``pagedjax`` command."""

from pagedjax.cli import main

if __name__ == "__main__":
    main()
