"""``python -m millpond`` is the program ``millpond``."""

from millpond.cli.app import main

if __name__ == "__main__":
    main()
