"""vLLM's names and defaults over the engine, for the offline class and for the server."""
