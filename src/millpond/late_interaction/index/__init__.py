"""The base of all late-interaction indexes: arguments, settings, documents."""
