"""The engine: tokenize, schedule, run, pool, resolve."""
