"""``python -m millpond`` is the program ``millpond``."""

from millpond.cli import main

if __name__ == "__main__":
    main()
