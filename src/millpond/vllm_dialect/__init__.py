"""vLLM's words for what the engine does, for the offline class and for the server."""
