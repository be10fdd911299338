"""vLLM's names for tasks, options and prompts, shared by the offline class and the server."""
