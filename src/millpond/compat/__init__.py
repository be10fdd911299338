"""Other projects' dialects over the engine."""
