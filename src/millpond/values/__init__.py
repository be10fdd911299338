"""Values: what goes into an engine, what comes out, and what is known of a model before it runs. No torch."""
