"""The HTTP server: FastAPI over engines, for the clients of OpenAI, Cohere, TEI and vLLM."""
