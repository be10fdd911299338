"""The program ``millpond``: one file per command."""
