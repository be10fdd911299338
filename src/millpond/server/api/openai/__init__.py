"""The routes of OpenAI's clients and vLLM's."""
