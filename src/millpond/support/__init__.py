"""What millpond adds to the standard library, for all packages."""
